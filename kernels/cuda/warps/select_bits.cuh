// SPDX-License-Identifier: Apache-2.0
// Bits of one word or another by a mask, in one instruction, where the compiler makes two of it.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

// Bits of `a` where `mask` has ones, of `b` where it has none.
__device__ __forceinline__ uint32_t SelectBits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t x;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(x) : "r"(mask), "r"(a), "r"(b));
  return x;
}

}  // namespace kvstrata::cuda
