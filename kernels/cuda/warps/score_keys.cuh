// SPDX-License-Identifier: Apache-2.0
// Scores as unsigned keys that top-k compares by their bits.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

// Keys order as the scores do: -0 equal to 0, NaN below everything. 0 is no score's key.
constexpr uint32_t kAbsent = 0, kNaN = 1;
__device__ inline uint32_t KeyOf(float x) {
  uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return kNaN;
  if (bits == 0x80000000u) bits = 0;
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace kvstrata::cuda
