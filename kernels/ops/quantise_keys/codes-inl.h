// SPDX-License-Identifier: Apache-2.0
// Numbers that share a minimum and step as codes of few bits (docs/spec/bits.md 2), by vectors: the
// bits that half_range.h gives. Included once per Highway target, after hwy/highway.h.
#if defined(KVSTRATA_KERNELS_OPS_QUANTISE_KEYS_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_QUANTISE_KEYS_CODES_INL_H_
#undef KVSTRATA_KERNELS_OPS_QUANTISE_KEYS_CODES_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_QUANTISE_KEYS_CODES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/ops/simd_rows-inl.h"
#include "kernels/pages/quantised_group.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

using VI = hn::VFromD<DI>;

inline constexpr int kBlockVectors = 4;  // vectors of channels whose minima stay in registers

// Minimum and step of each channel as they are stored, and 1 / step.
struct ChannelScales {
  float minimum[kHeadDimMax];
  float inverse[kHeadDimMax];
};

// NaN is 0; infinities and what no fp16 holds are the largest.
template <typename T>
HWY_INLINE VF LoadKeys(const std::byte* row, int channel) {
  const VF x = LoadFloats(reinterpret_cast<const T*>(row) + channel);
  const VF number = hn::IfThenZeroElse(hn::IsNaN(x), x);
  const VF limit = hn::Set(DF(), kQuantisedMax);
  return hn::Min(hn::Max(number, hn::Neg(limit)), limit);
}

// Bits of the largest fp16 that is at most x, or of the least that is at least x. |x| <= 65504.
template <bool kUp>
HWY_INLINE VI RoundTowards(VF x) {
  const DI d;
  const VI bits = hn::BitCast(d, x), magnitude = hn::And(bits, hn::Set(d, 0x7FFFFFFF));
  // Towards zero: cut mantissas of normal numbers, whole multiples of 2^-24 below them.
  const VI normal = hn::ShiftRight<13>(hn::Sub(magnitude, hn::Set(d, 112 << 23)));
  const VF scaled = hn::Mul(hn::BitCast(DF(), magnitude), hn::Set(DF(), 0x1p24f));
  const auto is_small = hn::Lt(magnitude, hn::Set(d, 113 << 23));
  const VI small =
      hn::ConvertTo(d, hn::IfThenZeroElse(hn::RebindMask(DF(), hn::Not(is_small)), scaled));
  const VI cut = hn::IfThenElse(is_small, small, normal);
  const auto cut_normal = hn::Ne(hn::And(magnitude, hn::Set(d, 0x1FFF)), hn::Zero(d));
  const auto cut_small = hn::RebindMask(d, hn::Ne(hn::ConvertTo(DF(), small), scaled));
  const auto inexact = hn::Or(hn::And(is_small, cut_small), hn::AndNot(is_small, cut_normal));
  const auto negative = hn::Lt(bits, hn::Zero(d));
  const auto away = hn::And(inexact, kUp ? hn::Not(negative) : negative);
  const VI half = hn::IfThenElse(away, hn::Add(cut, hn::Set(d, 1)), cut);
  const VI sign = hn::IfThenElseZero(negative, hn::Set(d, 0x8000));
  return hn::IfThenElseZero(hn::Ne(half, hn::Zero(d)), hn::Or(half, sign));
}

// Writes the fp16 of those bits and gives their values.
HWY_INLINE VF StoreHalves(VI bits, std::byte* to) {
  const hn::Rebind<uint16_t, DI> d16;
  uint16_t halves[kN];
  hn::StoreU(hn::DemoteTo(d16, bits), d16, halves);
  std::memcpy(to, halves, sizeof halves);
  return LoadFloats(reinterpret_cast<const F16*>(halves));
}

// Minimum and step of kBlockVectors vectors of channels, of `tokens` rows and codes 0 .. last; of
// channel c to 2 c bytes from `minima` and `steps` on.
template <typename T>
HWY_INLINE void ScaleBlock(const std::byte* const* rows, int tokens, int channel, int last,
                           std::byte* minima, std::byte* steps, ChannelScales& scales) {
  const DF d;
  constexpr int n = static_cast<int>(kN);
  VF low[kBlockVectors], high[kBlockVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kBlockVectors; ++v) {
    low[v] = high[v] = LoadKeys<T>(rows[0], channel + v * n);
  }
  for (int t = 1; t < tokens; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) {
      const VF x = LoadKeys<T>(rows[t], channel + v * n);
      low[v] = hn::Min(low[v], x);
      high[v] = hn::Max(high[v], x);
    }
  }
  const VF codes = hn::Set(d, static_cast<float>(last));
#pragma GCC unroll 4
  for (int v = 0; v < kBlockVectors; ++v) {
    const int c = channel + v * n;
    const VF minimum = StoreHalves(RoundTowards<false>(low[v]), minima + 2 * c);
    const VF width = hn::Div(hn::Sub(high[v], minimum), codes);
    const VF step = StoreHalves(RoundTowards<true>(width), steps + 2 * c);
    const VF inverse = hn::Div(hn::Set(d, 1.0f), step);
    hn::StoreU(minimum, d, scales.minimum + c);
    hn::StoreU(hn::IfThenElseZero(hn::Gt(step, hn::Zero(d)), inverse), d, scales.inverse + c);
  }
}

// Codes of a row, a byte each.
template <typename T>
HWY_INLINE void CodeRow(const std::byte* row, int dim, const ChannelScales& scales,
                        uint8_t* codes) {
  const DF d;
  const hn::Rebind<uint8_t, DI> d8;
  for (int c = 0; c < dim; c += static_cast<int>(kN)) {
    const VF above = hn::Sub(LoadKeys<T>(row, c), hn::LoadU(d, scales.minimum + c));
    const VI code = hn::NearestInt(hn::Mul(above, hn::LoadU(d, scales.inverse + c)));
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + c);
  }
}

// The words of one token of a plane of kWidth bits of each code, from bit kFirst on, each
// `apart` words behind the one before: eight channels' bytes at a time, whose codes of the other
// runs of channels lie beside them.
template <int kWidth, int kFirst>
HWY_INLINE void PackRow(const uint8_t* codes, int dim, int apart, std::byte* to) {
  constexpr uint64_t mask = ((1u << kWidth) - 1) * 0x0101010101010101ull;
  const int run = dim * kWidth / 8;
  for (int x = 0; x < run; x += 8) {
    uint64_t words = 0;
#pragma GCC unroll 8
    for (int m = 0; m < 8 / kWidth; ++m) {
      uint64_t eight;
      std::memcpy(&eight, codes + m * run + x, 8);
      words |= (eight >> kFirst & mask) << (kWidth * m);
    }
    const uint64_t kept = words & 0xFF0000FFFF0000FFull;  // the middle bytes change places
    words = kept | (words & 0x0000FF000000FF00ull) << 8 | (words >> 8 & 0x0000FF000000FF00ull);
    const auto first = static_cast<uint32_t>(words), second = static_cast<uint32_t>(words >> 32);
    std::memcpy(to + int64_t{x} * apart, &first, 4);
    std::memcpy(to + (int64_t{x} + 4) * apart, &second, 4);
  }
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_QUANTISE_KEYS_CODES_INL_H_
