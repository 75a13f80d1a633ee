// SPDX-License-Identifier: Apache-2.0
// How a kernel that writes rows to pages finds and notes what is not finite: three integer
// instructions a pair of elements, in the registers that it stores. Where all is finite nothing is
// loaded and nothing is stored.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/ops/append/append_cuda.h"

namespace kvstrata::cuda {

// Bits 15 and 31 say of which of two elements, a 32-bit word of a row, the exponent is all ones.
template <typename T>
__device__ __forceinline__ uint32_t NotFiniteBits(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7C00 : 0x7F80;
  constexpr uint32_t kLowest =
      kExponent & -kExponent;  // all ones and one more: a carry to the sign
  return (pair & kExponent * 0x10001u) + kLowest * 0x10001u;
}
__device__ __forceinline__ bool AnyNotFinite(uint32_t bits) { return (bits & 0x80008000u) != 0; }

// By a thread that wrote such an element of the sequence. All of them store the same.
__device__ __forceinline__ void NoteNotFinite(const NotFiniteWords& to, int sequence) {
  if (to.words == nullptr) return;
  *static_cast<volatile uint32_t*>(to.words + to.of[sequence]) = 1;
}

}  // namespace kvstrata::cuda
