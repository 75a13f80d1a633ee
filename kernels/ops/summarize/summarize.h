// SPDX-License-Identifier: Apache-2.0
// Op summarize: one summary row per unit of keys or values, for one (layer, KV head).
//
//   kMinMax  element-wise minimum and maximum of the unit's keys, exact in the keys' dtype (Quest)
//   kMean    fp32 sum in order of position, divided once by the count, then rounded to bf16 or kept
//            as fp32 (CHESS Eq. 1; docs/spec/chess.md 1). The order of the sum is part of the
//            contract: ref, simd and cuda agree bit for bit.
//
// The mean of rows of a finer level (CHESS chunks and grids, Eq. 2) is the same op over `rows`
// instead of `keys`. Work items are independent. Cost: reads each key once. No allocation.
#ifndef KVSTRATA_KERNELS_OPS_SUMMARIZE_SUMMARIZE_H_
#define KVSTRATA_KERNELS_OPS_SUMMARIZE_SUMMARIZE_H_

#include "kernels/executor.h"
#include "kernels/page_view.h"

namespace kvstrata {

struct SummarizeWork {
  enum class Kind : uint8_t { kMinMax, kMean };
  Kind kind = Kind::kMean;
  PagedRows keys;             // the source: token rows, or rows of a finer level dressed as pages
  Run rows;                   // positions [begin, end) of the source; not empty
  std::byte* out = nullptr;   // [dim] minimum or mean
  std::byte* out2 = nullptr;  // [dim] maximum; kMinMax only
  DType out_dtype = DType::kBF16;  // kMinMax: the keys' dtype; else kBF16 or kF32
};

void SummarizeRef(const SummarizeWork* work, int64_t n, Executor& executor);
void SummarizeSimd(const SummarizeWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_OPS_SUMMARIZE_SUMMARIZE_H_
