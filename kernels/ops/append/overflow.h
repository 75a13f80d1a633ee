// SPDX-License-Identifier: Apache-2.0
// Overflows: which fp32 becomes an infinity, or stays a NaN, in an element of a page.
//
// Threads: pure; any.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/pages/element.h"

namespace kvstrata {

// The bits of the smallest positive fp32 that becomes an infinity in the type. Those of greater
// magnitude, infinities and NaN are greater numbers.
template <typename T>
inline constexpr int32_t kOverflows = 0x7F800000;
template <>
inline constexpr int32_t kOverflows<F16> = 0x477FF000;  // 65520
template <>
inline constexpr int32_t kOverflows<BF16> = 0x7F7F8000;  // 2^128 - 2^119

inline bool Overflows(float x, DType dtype) {
  const auto magnitude = static_cast<int32_t>(std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu);
  return WithElement(dtype, [&]<typename T>() { return magnitude >= kOverflows<T>; });
}

}  // namespace kvstrata
