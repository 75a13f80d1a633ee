// SPDX-License-Identifier: Apache-2.0
// Op summarize: one summary row per unit of keys or values, for one (layer, KV head).
//
//   kMinMax     element-wise minimum and maximum of the unit's keys, exact in the keys' dtype
//   (Quest) kDeviation  mean and variance (docs/spec/beyond.md 10): the sum of kMean; then, in the
//   same
//               order, that of squared differences from the unrounded mean, no operation fused.
//               Rounded to the keys' dtype, a variance to at most 65504 in fp16
//   kMean       fp32 sum in order of position, divided once by the count, then rounded to bf16 or
//               kept as fp32 (CHESS Eq. 1; docs/spec/chess.md 1)
// The order of sums is part of the contract: ref, simd and cuda agree bit for bit.
//
// The mean of rows of a finer level (CHESS chunks and grids, Eq. 2) is the same op over `rows`
// instead of `keys`. Work items are independent. Cost: reads each key once. No allocation.
#pragma once

#include <type_traits>

#include "kernels/cpu/executor.h"
#include "kernels/pages/dtype.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

// A variance as it is stored.
inline constexpr float kMostHalfVariance = 65504;
template <typename T>
T VarianceOf(float x) {
  return FromFloat<T>(std::is_same_v<T, F16> && x > kMostHalfVariance ? kMostHalfVariance : x);
}

struct SummarizeWork {
  enum class Kind : uint8_t { kMinMax, kDeviation, kMean };
  Kind kind = Kind::kMean;
  PagedRows keys;             // the source: token rows, or rows of a finer level dressed as pages
  Run rows;                   // positions [begin, end) of the source; not empty
  std::byte* out = nullptr;   // [dim] minimum or mean
  std::byte* out2 = nullptr;  // [dim] maximum or variance; not of kMean
  DType out_dtype = DType::kBF16;  // kMean: kBF16 or kF32; else the keys' dtype
};

void SummarizeRef(const SummarizeWork* work, int64_t n, Executor& executor);
void SummarizeSimd(const SummarizeWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
