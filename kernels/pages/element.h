// SPDX-License-Identifier: Apache-2.0
// WithElement: from a DType, which data carries, to the type that code is compiled for. The one
// place where the CPU's code lists the dtypes of rows.
//
// Threads: pure; any.
#pragma once

#include "kernels/pages/dtype.h"

namespace kvstrata {

// fn.operator()<T>(), of the elements' type T.
template <typename Fn>
decltype(auto) WithElement(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kF16:
      return fn.template operator()<F16>();
    case DType::kBF16:
      return fn.template operator()<BF16>();
    case DType::kF32:
      break;
  }
  return fn.template operator()<float>();
}

}  // namespace kvstrata
