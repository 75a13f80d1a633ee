// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/attend_raw/attend_raw_simd.cc"
#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/attend_raw/decode-inl.h"
#include "kernels/ops/attend_raw/prefill-inl.h"
#include "kernels/pages/element.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

template <typename T>
void AttendTyped(const AttendWork& w) {
  // Few queries: memory is the limit. Many: the multipliers are.
  const bool few = w.queries * w.group <= kDecodeQueriesMax;
  if (w.rotary == nullptr) {
    return few ? AttendFew<T, StoredKeys<T>>(w) : AttendMany<T>(w, nullptr);
  }
  if (few) return AttendFew<T, RotatedKeys<T>>(w);
  RowRotator rotator(w);
  AttendMany<T>(w, &rotator);
}

void AttendItem(const AttendWork& w) {
  WithElement(w.k.dtype, [&]<typename T>() { AttendTyped<T>(w); });
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(AttendItem);

void AttendRawSimd(const AttendWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    KVS_CHECK(work[i].k.dtype == work[i].v.dtype && work[i].k.dim == work[i].v.dim);
    KVS_CHECK(work[i].k.dim % 64 == 0 && work[i].k.dim <= 256);
    KVS_SIMD_CALL(AttendItem)(work[i]);
  });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
