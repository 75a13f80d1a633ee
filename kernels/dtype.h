// Element types of keys, values and queries, and conversions of single elements.
//
// bf16 and fp16 are stored as their 16 bits. Conversions from fp32 round to nearest, ties to even;
// NaN stays NaN (bf16: 0x7FC0).
#ifndef KVSTRATA_KERNELS_DTYPE_H_
#define KVSTRATA_KERNELS_DTYPE_H_

#include <bit>
#include <cstdint>
#include <string_view>

namespace kvstrata {

enum class DType : uint8_t { kF32 = 1, kF16 = 2, kBF16 = 3 };

constexpr int64_t SizeOf(DType t) { return t == DType::kF32 ? 4 : 2; }
constexpr bool IsDType(int v) { return v >= 1 && v <= 3; }
constexpr std::string_view NameOf(DType t) {
  return t == DType::kF32 ? "f32" : t == DType::kF16 ? "f16" : "bf16";
}

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(BF16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float ToFloat(F16 x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }

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
template <>
inline F16 FromFloat<F16>(float x) {
  return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_DTYPE_H_
