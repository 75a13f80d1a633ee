// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/merge/merge_simd.cc"
#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/ops/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

HWY_INLINE float Weight(float m, float top) {
  return hn::GetLane(ExpNonPositive(hn::Set(DF(), m - top)));
}

HWY_INLINE void MergeRow(const MergeWork& w, int32_t row) {
  const DF d;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  constexpr int n = static_cast<int>(kN);
  const int32_t token = row / w.group, g = row % w.group;
  float* out = w.out + token * w.out_token + int64_t{g} * w.dim;
  float top = kNone;
  for (int32_t j = 0; j < w.parts; ++j) top = std::max(top, w.m[int64_t{j} * w.rows + row]);
  for (int c = 0; c < w.dim; c += n) hn::StoreU(hn::Zero(d), d, out + c);
  float l = 0;
  for (int32_t j = 0; j < w.parts; ++j) {
    const int64_t at = int64_t{j} * w.rows + row;
    if (w.m[at] == kNone) continue;  // empty
    const float weight = Weight(w.m[at], top);
    const VF factor = hn::Set(d, weight);
    l += weight * w.l[at];
    for (int c = 0; c < w.dim; c += n) {
      const VF o = hn::LoadU(d, w.o + at * w.dim + c);
      hn::StoreU(hn::MulAdd(factor, o, hn::LoadU(d, out + c)), d, out + c);
    }
  }
  if (l != 0) {
    const VF scale = hn::Set(d, 1.0f / l);
    for (int c = 0; c < w.dim; c += n)
      hn::StoreU(hn::Mul(hn::LoadU(d, out + c), scale), d, out + c);
  }
  if (w.lse == nullptr) return;
  w.lse[token * w.lse_token + g] =
      l == 0 ? kNone : static_cast<float>(top + std::log(static_cast<double>(l)));
}

void MergeItem(const MergeWork& w) {
  for (int32_t row = 0; row < w.rows; ++row) MergeRow(w, row);
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(MergeItem);

void MergeSimd(const MergeWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(MergeItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
