// SPDX-License-Identifier: Apache-2.0
// Single elements of tensors whose dtype is known at run time: for refs, which go through rows one
// number at a time. REQUIRES: values aligned to their size.
#pragma once

#include "kernels/pages/element.h"

namespace kvstrata {

inline float ElementAt(const void* values, DType dtype, int64_t i) {
  return WithElement(dtype,
                     [&]<typename T>() { return ToFloat(static_cast<const T*>(values)[i]); });
}

inline void SetElement(void* values, DType dtype, int64_t i, float x) {
  WithElement(dtype, [&]<typename T>() { static_cast<T*>(values)[i] = FromFloat<T>(x); });
}

}  // namespace kvstrata
