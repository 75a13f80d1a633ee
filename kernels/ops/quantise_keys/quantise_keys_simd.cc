// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/quantise_keys/quantise_keys_simd.cc"
#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/quantise_keys/codes-inl.h"
#include "kernels/ops/quantise_keys/quantise_keys.h"
#include "kernels/pages/element.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

inline constexpr int kTokensMax = 256;

template <typename T>
HWY_INLINE void Quantise(const QuantiseKeysWork& w) {
  const QuantisedGroup& f = w.format;
  const std::byte* rows[kTokensMax];
  for (int t = 0; t < f.tokens; ++t) rows[t] = w.keys.Row(w.begin + t);
  ChannelScales scales;
  for (int c = 0; c < f.dim; c += kBlockVectors * static_cast<int>(kN)) {
    ScaleBlock<T>(rows, f.tokens, c, (1 << f.bits) - 1, w.out, w.out + f.step_offset(), scales);
  }
  uint8_t codes[kHeadDimMax];
  for (int t = 0; t < f.tokens; ++t) {
    CodeRow<T>(rows[t], f.dim, scales, codes);
    std::byte* to = w.out + f.codes_offset() + 4 * t;
    if (f.bits == 4) {
      PackRow<4, 0>(codes, f.dim, f.tokens, to);
      continue;
    }
    PackRow<2, 0>(codes, f.dim, f.tokens, to);
    if (f.bits == 3) PackRow<1, 2>(codes, f.dim, f.tokens, w.out + f.high_offset() + 4 * t);
  }
}

void QuantiseItem(const QuantiseKeysWork& w) {
  KVS_CHECK(w.format.IsValid() && w.keys.dim == w.format.dim);
  WithElement(w.keys.dtype, [&]<typename T>() { Quantise<T>(w); });
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(QuantiseItem);

void QuantiseKeysSimd(const QuantiseKeysWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(QuantiseItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
