// SPDX-License-Identifier: Apache-2.0
// Logits of tokens whose keys are codes of few bits, a vector of tokens at a time: queries are
// folded with a group's steps and rounded to 8 bits, and meet codes in whole numbers. Included once
// per Highway target, by ops over such groups.
#if defined(KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_DOT_INL_H_
#undef KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_DOT_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_DOT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/pages/quantised_group.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

using VI = hn::VFromD<DI>;
using VU = hn::VFromD<DU>;
using D16 = hn::Repartition<int16_t, DI>;
using V16 = hn::VFromD<D16>;

inline constexpr int kQueries = 4;  // at a time

// Queries of a group: q * step in 8 bits, in the order of the words' bytes; and what turns sums of
// codes into logits: base + factor * sum.
struct FoldedQueries {
  int8_t q[kQueries][kHeadDimMax];
  float factor[kQueries], base[kQueries];
};

// Sums of products of neighbouring bytes, of unsigned `a` below 16 and signed `b`.
HWY_INLINE V16 MulBytes(VU a, VI b) {
#if HWY_TARGET == HWY_AVX3
  return V16{_mm512_maddubs_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return V16{_mm256_maddubs_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_SSE4
  return V16{_mm_maddubs_epi16(a.raw, b.raw)};
#else
  const D16 d;
  const V16 even = hn::And(hn::BitCast(d, a), hn::Set(d, 0xFF));
  const V16 odd = hn::ShiftRight<8>(hn::BitCast(d, a));
  const V16 signed_even = hn::ShiftRight<8>(hn::ShiftLeft<8>(hn::BitCast(d, b)));
  const V16 signed_odd = hn::ShiftRight<8>(hn::BitCast(d, b));
  return hn::Add(hn::Mul(even, signed_even), hn::Mul(odd, signed_odd));
#endif
}

// The two halves of each lane, added.
HWY_INLINE VI SumOfHalves(V16 halves) {
#if HWY_TARGET == HWY_AVX3
  return VI{_mm512_madd_epi16(halves.raw, _mm512_set1_epi16(1))};
#elif HWY_TARGET == HWY_AVX2
  return VI{_mm256_madd_epi16(halves.raw, _mm256_set1_epi16(1))};
#else
  const VI pair = hn::BitCast(DI(), halves);
  return hn::Add(hn::ShiftRight<16>(hn::ShiftLeft<16>(pair)), hn::ShiftRight<16>(pair));
#endif
}

// Two vectors of whole numbers as bytes of either sign, in the order of a word's bytes: channels 0,
// 2, 1, 3.
template <typename Byte>
HWY_INLINE void StoreBytes(VI a, VI b, Byte* to) {
  const hn::Rebind<Byte, D16> d8;
  const hn::Repartition<uint32_t, decltype(d8)> d32;
  alignas(16) static constexpr Byte kOrder[16] = {0, 2,  1, 3,  4,  6,  5,  7,
                                                  8, 10, 9, 11, 12, 14, 13, 15};
  // Narrowing two vectors lays blocks of four of one between those of the other.
  constexpr uint32_t n = kN / 4;
  alignas(64) static constexpr auto kWords = [] {
    struct {
      uint32_t from[2 * n];
    } order{};
    for (uint32_t i = 0; i < n; ++i) order.from[i] = 2 * i, order.from[n + i] = 2 * i + 1;
    return order;
  }();
  const auto bytes = hn::DemoteTo(d8, hn::ReorderDemote2To(D16(), a, b));
  const auto words =
      hn::TableLookupLanes(hn::BitCast(d32, bytes), hn::SetTableIndices(d32, kWords.from));
  hn::StoreU(hn::TableLookupBytes(hn::BitCast(d8, words), hn::LoadDup128(d8, kOrder)), d8, to);
}

// What a code counts as: minimum + step * (cell * code + offset).
struct CodeReading {
  float cell = 1, offset = 0;
};

// q [H][dim] with the scales of `group`.
template <int H>
HWY_INLINE void Fold(const QuantisedGroup& f, const std::byte* group, const CodeReading& reading,
                     const float* q, float scale, FoldedQueries& folded) {
  const DF d;
  constexpr int n = static_cast<int>(kN);
  const auto* minima = reinterpret_cast<const F16*>(group);
  const auto* steps = reinterpret_cast<const F16*>(group + f.step_offset());
  const float middle_code = 0.5f * static_cast<float>((1 << f.bits) - 1);
  const VF middle = hn::Set(d, middle_code), cell = hn::Set(d, reading.cell);
  const VF middle_steps = hn::Set(d, reading.cell * middle_code + reading.offset);
  float products[H][kHeadDimMax];
  VF largest[H], base[H];
  for (int h = 0; h < H; ++h) largest[h] = base[h] = hn::Zero(d);
  for (int c = 0; c < f.dim; c += n) {
    const VF step = LoadFloats(steps + c);
    const VF mean = hn::MulAdd(middle_steps, step, LoadFloats(minima + c));
    const VF wide = hn::Mul(cell, step);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const VF x = hn::LoadU(d, q + h * f.dim + c), product = hn::Mul(x, wide);
      base[h] = hn::MulAdd(x, mean, base[h]);
      largest[h] = hn::Max(largest[h], hn::Abs(product));
      hn::StoreU(product, d, products[h] + c);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    const float top = hn::GetLane(hn::MaxOfLanes(d, largest[h]));
    const bool none = top < 1e-30f;  // 127 / top has no fp32
    const VF inverse = hn::Set(d, none ? 0.0f : 127.0f / top);
    const float factor = none ? 0.0f : top / 127.0f;
    VI whole = hn::Zero(DI());
    for (int c = 0; c < f.dim; c += 2 * n) {
      const VI a = hn::NearestInt(hn::Mul(hn::LoadU(d, products[h] + c), inverse));
      const VI b = hn::NearestInt(hn::Mul(hn::LoadU(d, products[h] + c + n), inverse));
      whole = hn::Add(whole, hn::Add(a, b));
      StoreBytes(a, b, folded.q[h] + c);
    }
    // Codes count from the middle one: what a query loses by rounding then weighs least.
    const VF lost = hn::Mul(hn::ConvertTo(d, whole), hn::Mul(middle, hn::Set(d, factor)));
    folded.factor[h] = scale * factor;
    folded.base[h] = scale * hn::GetLane(hn::SumOfLanes(d, hn::Sub(base[h], lost)));
  }
}

// Codes of the run of channels whose bits are the lowest of each byte.
template <int kBits>
HWY_INLINE VU LowestCodes(VU low, VU high) {
  const VU codes = hn::And(low, hn::Set(DU(), kBits == 4 ? 0x0F0F0F0Fu : 0x03030303u));
  if constexpr (kBits != 3) return codes;
  return hn::Or(codes, hn::ShiftLeft<2>(hn::And(high, hn::Set(DU(), 0x01010101u))));
}

// Adds the products of word `word` of a vector of tokens with each query, run after run of
// channels. Not unrolled: the compiler would add runs to each other first, for which there are no
// registers.
template <int kBits, int H>
HWY_INLINE void AddWord(VU low, VU high, const FoldedQueries& folded, int word, int run,
                        V16 (&held)[H]) {
  constexpr int shift = kBits == 4 ? 4 : 2, runs = 8 / shift;
  const int8_t* query = folded.q[0] + 4 * word;
#pragma GCC unroll 1
  for (int m = 0; m < runs; ++m, query += run) {
    const VU codes = LowestCodes<kBits>(low, high);
    low = hn::ShiftRight<shift>(low);
    high = hn::ShiftRight<shift>(high);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      int32_t four;
      std::memcpy(&four, query + h * kHeadDimMax, 4);
      held[h] = hn::Add(held[h], MulBytes(codes, hn::Set(DI(), four)));
    }
  }
}

// Logits of a vector of tokens of a group, from `token` on: out[h * out_query + t].
template <int kBits, int H>
HWY_INLINE void ScoreVector(const QuantisedGroup& f, const std::byte* group, int token,
                            const FoldedQueries& folded, float* out, int64_t out_query) {
  // Words until an int16 is full: each run of one adds up to 2 * 127 * (2^bits - 1).
  constexpr int kHeld = kBits == 2 ? 8 : 4;
  const int words = f.dim * f.plane_bits() / 32, half = words / 2;
  const auto* low = reinterpret_cast<const uint32_t*>(group + f.codes_offset()) + token;
  const auto* high = reinterpret_cast<const uint32_t*>(group + f.high_offset()) + token;
  VI sums[H];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) sums[h] = hn::Zero(DI());
  for (int first = 0; first < words; first += kHeld) {
    V16 held[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) held[h] = hn::Zero(D16());
    for (int i = first; i < std::min(first + kHeld, words); ++i) {
      const VU word = hn::LoadU(DU(), low + i * f.tokens);
      VU bits = word;
      if constexpr (kBits == 3) {  // a word of high bits serves two words, every other bit one
        bits = hn::LoadU(DU(), high + i % half * f.tokens);
        if (i >= half) bits = hn::ShiftRight<1>(bits);
      }
      AddWord<kBits>(word, bits, folded, i, 4 * words, held);
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) sums[h] = hn::Add(sums[h], SumOfHalves(held[h]));
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    const VF factor = hn::Set(DF(), folded.factor[h]), base = hn::Set(DF(), folded.base[h]);
    hn::StoreU(hn::MulAdd(hn::ConvertTo(DF(), sums[h]), factor, base), DF(), out + h * out_query);
  }
}

// Asks for the bytes [from, to) of a group, which lie a word of all tokens apart when they are
// read: no stride that a core would guess. Null: there is none.
HWY_INLINE void Prefetch(const std::byte* group, int64_t from, int64_t to) {
  if (group == nullptr) return;
  for (int64_t at = from; at < to; at += 64) __builtin_prefetch(group + at);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_SCORE_BITS_BITS_DOT_INL_H_
