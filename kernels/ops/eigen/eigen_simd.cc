// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/eigen/eigen_simd.cc"

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/eigen/jacobi-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

void EigenItem(const EigenWork& w) {
  KVS_CHECK(w.dim >= 1 && w.dim <= 256);
  Jacobi jacobi(w.a, w.dim, w.dim);
  jacobi.Run();
  WriteEigen(w, jacobi.Values().data(), jacobi.vectors(), jacobi.vector_stride());
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(EigenItem);

void EigenSimd(const EigenWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(EigenItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
