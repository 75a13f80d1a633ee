#include "kernels/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/score_bits/score_bits_simd.cc"
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/score_bits/score_bits.h"
#include "kernels/ops/simd_rows-inl.h"

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

// A word's bytes are channels 0, 2, 1, 3 of its four.
HWY_INLINE void StoreBytes(VI x, int8_t* to) {
  const hn::Rebind<int8_t, DI> d8;
  alignas(16) static constexpr int8_t kOrder[16] = {0, 2,  1, 3,  4,  6,  5,  7,
                                                    8, 10, 9, 11, 12, 14, 13, 15};
  hn::StoreU(hn::TableLookupBytes(hn::DemoteTo(d8, x), hn::LoadU(d8, kOrder)), d8, to);
}

// Query h of `folded`: q [dim] with the scales of `group`.
HWY_INLINE void Fold(const QuantisedGroup& f, const std::byte* group, const float* q, int h,
                     float scale, FoldedQueries& folded) {
  const DF d;
  constexpr int n = static_cast<int>(kN);
  const auto* minima = reinterpret_cast<const F16*>(group);
  const auto* steps = reinterpret_cast<const F16*>(group + f.step_offset());
  float products[kHeadDimMax];
  VF largest = hn::Zero(d), at_minimum = hn::Zero(d), sum = hn::Zero(d);
  for (int c = 0; c < f.dim; c += n) {
    const VF x = hn::LoadU(d, q + c), product = hn::Mul(x, LoadFloats(steps + c));
    at_minimum = hn::MulAdd(x, LoadFloats(minima + c), at_minimum);
    sum = hn::Add(sum, product);
    largest = hn::Max(largest, hn::Abs(product));
    hn::StoreU(product, d, products + c);
  }
  const float top = hn::GetLane(hn::MaxOfLanes(d, largest));
  const bool none = top < 1e-30f;  // 127 / top has no fp32
  const VF inverse = hn::Set(d, none ? 0.0f : 127.0f / top);
  VI whole = hn::Zero(DI());
  for (int c = 0; c < f.dim; c += n) {
    const VI rounded = hn::NearestInt(hn::Mul(hn::LoadU(d, products + c), inverse));
    whole = hn::Add(whole, rounded);
    StoreBytes(rounded, folded.q[h] + c);
  }
  const float factor = none ? 0.0f : top / 127.0f;
  const auto rounded_sum = static_cast<float>(hn::GetLane(hn::SumOfLanes(DI(), whole)));
  const float beside = hn::GetLane(hn::SumOfLanes(d, sum)) - factor * rounded_sum;
  const float middle = 0.5f * static_cast<float>((1 << f.bits) - 1);
  folded.factor[h] = scale * factor;
  folded.base[h] = scale * (hn::GetLane(hn::SumOfLanes(d, at_minimum)) + middle * beside);
}

// Words of kVectors vectors of tokens, and of their plane of high bits where there is one: moved so
// that the bits of run m are those from 2 m on, as in the other plane.
template <int kVectors>
struct Words {
  VU low[kVectors], high[kVectors];
};

template <int H, int kVectors, typename V>
struct Sums {
  V of[H][kVectors];
};

template <int kBits, int kVectors>
HWY_INLINE Words<kVectors> LoadWords(const uint32_t* low, const uint32_t* high, int tokens,
                                     int word, int half) {
  constexpr int n = static_cast<int>(kN);
  Words<kVectors> words;
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    words.low[v] = words.high[v] = hn::LoadU(DU(), low + word * tokens + v * n);
    if constexpr (kBits == 3) {
      const VU bits = hn::LoadU(DU(), high + word % half * tokens + v * n);
      words.high[v] = word < half ? bits : hn::ShiftRight<1>(bits);
    }
  }
  return words;
}

// Codes of run m in bytes.
template <int kBits, int m>
HWY_INLINE VU CodesOf(VU low, VU high) {
  constexpr int shift = m * (kBits == 4 ? 4 : 2);
  const VU moved = hn::ShiftRight<shift>(low);
  if constexpr (kBits == 4) return hn::And(moved, hn::Set(DU(), 0x0F0F0F0Fu));
  const VU two = hn::And(moved, hn::Set(DU(), 0x03030303u));
  if constexpr (kBits == 2) return two;
  const VU one = hn::And(hn::ShiftRight<shift>(high), hn::Set(DU(), 0x01010101u));
  return hn::Or(two, hn::ShiftLeft<2>(one));
}

// Adds the products of run m of a word with each query's four bytes at `at`.
template <int kBits, int m, int H, int kVectors>
HWY_INLINE void AddRun(const Words<kVectors>& words, const FoldedQueries& folded, int at,
                       Sums<H, kVectors, V16>& held) {
  VU codes[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) codes[v] = CodesOf<kBits, m>(words.low[v], words.high[v]);
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    int32_t four;
    std::memcpy(&four, folded.q[h] + at, 4);
    const VI query = hn::Set(DI(), four);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      held.of[h][v] = hn::Add(held.of[h][v], MulBytes(codes[v], query));
    }
  }
}

template <int H, int kVectors, typename D>
HWY_INLINE void Clear(D d, Sums<H, kVectors, hn::VFromD<D>>& sums) {
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums.of[h][v] = hn::Zero(d);
  }
}

// Adds the two halves of each token's lane.
template <int H, int kVectors>
HWY_INLINE void AddHalves(const Sums<H, kVectors, V16>& held, Sums<H, kVectors, VI>& sums) {
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const VI pair = hn::BitCast(DI(), held.of[h][v]);
      const VI low = hn::ShiftRight<16>(hn::ShiftLeft<16>(pair));
      sums.of[h][v] = hn::Add(sums.of[h][v], hn::Add(low, hn::ShiftRight<16>(pair)));
    }
  }
}

// Logits of kVectors vectors of tokens of a group, from `token` on: out[h * out_query + t].
template <int kBits, int H, int kVectors>
HWY_INLINE void ScoreVectors(const QuantisedGroup& f, const std::byte* group, int token,
                             const FoldedQueries& folded, float* out, int64_t out_query) {
  constexpr int n = static_cast<int>(kN);
  // Words until an int16 is full: a run adds up to 2 * 127 * (2^bits - 1).
  constexpr int kHeld = kBits == 2 ? 8 : 4;
  const int words = f.dim * f.plane_bits() / 32, run = 4 * words;
  const auto* low = reinterpret_cast<const uint32_t*>(group + f.codes_offset()) + token;
  const auto* high = reinterpret_cast<const uint32_t*>(group + f.high_offset()) + token;
  Sums<H, kVectors, VI> sums;
  Clear<H, kVectors>(DI(), sums);
  for (int first = 0; first < words; first += kHeld) {
    Sums<H, kVectors, V16> held;
    Clear<H, kVectors>(D16(), held);
    for (int i = first; i < std::min(first + kHeld, words); ++i) {
      const auto at = LoadWords<kBits, kVectors>(low, high, f.tokens, i, words / 2);
      AddRun<kBits, 0>(at, folded, 4 * i, held);
      AddRun<kBits, 1>(at, folded, 4 * i + run, held);
      if constexpr (kBits == 4) continue;
      AddRun<kBits, 2>(at, folded, 4 * i + 2 * run, held);
      AddRun<kBits, 3>(at, folded, 4 * i + 3 * run, held);
    }
    AddHalves(held, sums);
  }
  for (int h = 0; h < H; ++h) {
    const VF factor = hn::Set(DF(), folded.factor[h]), base = hn::Set(DF(), folded.base[h]);
    for (int v = 0; v < kVectors; ++v) {
      const VF logits = hn::MulAdd(hn::ConvertTo(DF(), sums.of[h][v]), factor, base);
      hn::StoreU(logits, DF(), out + h * out_query + v * n);
    }
  }
}

// Logits of `run`, tokens of one group: out[h * out_query + t - run.begin].
template <int kBits, int H>
HWY_NOINLINE void ScoreGroup(const QuantisedGroup& f, const std::byte* group,
                             const FoldedQueries& folded, Run run, float* out, int64_t out_query) {
  constexpr int n = static_cast<int>(kN), two = 2 * n;
  float edge[H * two];
  for (int t = run.begin / two * two; t < run.end; t += two) {
    const bool pair = t + two <= f.tokens, whole = t >= run.begin && t + two <= run.end;
    float* to = whole ? out + (t - run.begin) : edge;
    const int64_t stride = whole ? out_query : two;
    if (pair) {
      ScoreVectors<kBits, H, 2>(f, group, t, folded, to, stride);
    } else {
      ScoreVectors<kBits, H, 1>(f, group, t, folded, to, stride);
    }
    if (whole) continue;
    const int begin = std::max(t, run.begin), end = std::min(t + two, run.end);
    for (int h = 0; h < H; ++h) {
      const float* from = edge + h * two - t;
      std::copy(from + begin, from + end, out + h * out_query + (begin - run.begin));
    }
  }
}

// Queries [first, first + H) over the whole run.
template <int kBits, int H>
HWY_INLINE void ScoreQueries(const ScoreBitsWork& w, int first) {
  const QuantisedGroup& f = w.rows.format;
  FoldedQueries folded;
  float* out = w.out + first * w.out_query;
  for (int32_t t = w.run.begin; t < w.run.end;) {
    const int32_t start = t / f.tokens * f.tokens, end = std::min(start + f.tokens, w.run.end);
    const std::byte* group = w.rows.Group(t / f.tokens);
    for (int h = 0; h < H; ++h) {
      Fold(f, group, w.q + int64_t{first + h} * f.dim, h, w.scale, folded);
    }
    ScoreGroup<kBits, H>(f, group, folded, {t - start, end - start}, out + (t - w.run.begin),
                         w.out_query);
    t = end;
  }
}

template <int kBits>
HWY_INLINE void ScoreAll(const ScoreBitsWork& w) {
  for (int first = 0; first < w.queries; first += kQueries) {
    switch (w.queries - first) {
      case 1:
        ScoreQueries<kBits, 1>(w, first);
        break;
      case 2:
        ScoreQueries<kBits, 2>(w, first);
        break;
      case 3:
        ScoreQueries<kBits, 3>(w, first);
        break;
      default:
        ScoreQueries<kBits, kQueries>(w, first);
    }
  }
}

void ScoreBitsItem(const ScoreBitsWork& w) {
  KVS_CHECK(w.rows.format.IsValid());
  switch (w.rows.format.bits) {
    case 2:
      return ScoreAll<2>(w);
    case 3:
      return ScoreAll<3>(w);
    default:
      return ScoreAll<4>(w);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(ScoreBitsItem);

void ScoreBitsSimd(const ScoreBitsWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(ScoreBitsItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
