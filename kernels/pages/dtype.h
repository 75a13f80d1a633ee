// SPDX-License-Identifier: Apache-2.0
// Element types of keys, values and queries, and conversions of single elements.
//
// bf16 and fp16 are stored as their 16 bits. Conversions from fp32 round to nearest, ties to even;
// NaN stays NaN (bf16: 0x7FC0).
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvstrata {

enum class DType : uint8_t { kF32 = 1, kF16 = 2, kBF16 = 3 };

constexpr int64_t SizeOf(DType t) { return t == DType::kF32 ? 4 : 2; }
constexpr bool IsDType(int v) { return v >= 1 && v <= 3; }
constexpr std::string_view NameOf(DType t) {
  return t == DType::kF32 ? "f32" : t == DType::kF16 ? "f16" : "bf16";
}

// All there are, as messages list them: "PREFIX_F32 (1), ...".
std::string AllDTypes(std::string_view prefix);

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// The bits of an element that NaN and infinity, and nothing finite, have all set.
template <typename T>
inline constexpr uint16_t kNotFinite = 0;
template <>
inline constexpr uint32_t kNotFinite<float> = 0x7F800000u;
template <>
inline constexpr uint16_t kNotFinite<F16> = 0x7C00u;
template <>
inline constexpr uint16_t kNotFinite<BF16> = 0x7F80u;

inline float ToFloat(float x) { return x; }
inline float ToFloat(BF16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
T FromFloat(float x);
template <>
inline float FromFloat<float>(float x) {
  return x;
}
template <>
inline BF16 FromFloat<BF16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FC0};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

#ifdef __FLT16_MAX__
inline float ToFloat(F16 x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
template <>
inline F16 FromFloat<F16>(float x) {
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}
#else  // clang before 15 has no _Float16 on x86: the same bits by hand.
inline float ToFloat(F16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = (x.bits & 0x7FFFu) << 13;
  if (magnitude > 0x7C00u << 13) return std::bit_cast<float>(sign | 0x7FC00000u | magnitude);
  if (magnitude == 0x7C00u << 13) return std::bit_cast<float>(sign | 0x7F800000u);
  // Exact, subnormals too: the exponents' biases are 112 apart.
  return std::bit_cast<float>(sign |
                              std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}
template <>
inline F16 FromFloat<F16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t half = 0x7C00u;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | (magnitude >> 13 & 0x3FFu);
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the ulp of 0.5 is that of subnormals
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else if (magnitude < 0x477FF000u) {  // what rounds to at most 65504
    half = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}
#endif

}  // namespace kvstrata
