// Single elements of tensors whose dtype is known at run time: for refs, which go through rows one
// number at a time. REQUIRES: values aligned to their size.
#ifndef KVSTRATA_KERNELS_OPS_ELEMENTS_H_
#define KVSTRATA_KERNELS_OPS_ELEMENTS_H_

#include "kernels/dtype.h"

namespace kvstrata {

inline float ElementAt(const void* values, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(values)[i];
  if (dtype == DType::kF16) return ToFloat(static_cast<const F16*>(values)[i]);
  return ToFloat(static_cast<const BF16*>(values)[i]);
}

inline void SetElement(void* values, DType dtype, int64_t i, float x) {
  if (dtype == DType::kF32) static_cast<float*>(values)[i] = x;
  if (dtype == DType::kF16) static_cast<F16*>(values)[i] = FromFloat<F16>(x);
  if (dtype == DType::kBF16) static_cast<BF16*>(values)[i] = FromFloat<BF16>(x);
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_OPS_ELEMENTS_H_
