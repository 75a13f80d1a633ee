// SPDX-License-Identifier: Apache-2.0
// Keys of a group of planes against the query heads of one token: coarse logits of all its tokens,
// in whole numbers (score_bits/bits_dot-inl.h), and fine logits of some, in fp32. Included once per
// Highway target, by op attend_planes.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_KEYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_KEYS_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_KEYS_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_KEYS_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "hwy/highway.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/attend_planes/plane_words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

// The query heads of a token, folded with the steps of one group after the other.
template <typename Format>
class GroupQueries {
 public:
  GroupQueries(int heads, const Format& format)
      : format_(format), heads_(static_cast<size_t>(heads)) {}

  int32_t group() const { return group_; }

  // q [heads][dim], with the logits' scale.
  void Fold(int32_t group, const std::byte* upper, const float* q) {
    group_ = group;
    ForHeads(heads(), [&]<int H>(int h) HWY_ATTR { FoldHeads<H>(upper, q, h); });
  }

  // Coarse logits of all tokens: out[h * out_head + t]. Asks for the keys of group `next`
  // meanwhile.
  void Score(const std::byte* upper, const std::byte* next, float* out, int64_t out_head) const {
    Lines(next, f().key_codes()).AskForAll();
    WithDot([&]<typename Dot>() HWY_ATTR {
      ForHeads(heads(), [&]<int H>(int h) HWY_ATTR {
        ScoreHeads<Dot, H>(WordsOf(upper), WordsOf(next), out + h * out_head, out_head, h);
      });
    });
  }

  // What a token's score for head h is above its coarse logit.
  float HalfVariance(int h) const { return HeadsFrom(h)->half_variance; }

  // Fine logits of the group's tokens t + i, bit i of `tokens` set: out[h * out_head + i].
  void ScoreFine(const std::byte* upper, const std::byte* lower, int t, uint32_t tokens, float* out,
                 int64_t out_head) const {
    const auto* const words = reinterpret_cast<const int32_t*>(WordsOf(upper)) + t;
    const auto* const rows = reinterpret_cast<const uint8_t*>(lower) + t * f().row_bytes();
    FineKeys keys;
    int n = 0;
    ForBits(tokens, [&](int i) HWY_ATTR {
      Unpack(f(), KeyDigits{words + i, f().tokens}, rows + i * f().row_bytes(), keys.codes[n]);
      keys.at[n] = i;
      if (++n == kFineKeys) ScoreFineKeys<kFineKeys>(keys, 0, out, out_head), n = 0;
    });
    for (int i = 0; i < n; ++i) ScoreFineKeys<1>(keys, i, out, out_head);
  }

 private:
  // Codes and digits count from their middle on: what rounding loses then weighs least.
  struct Head {
    float base;                               // the logit where all codes are MiddleCode
    float digit_base, digit;                  // plane 0's, and what a product counts
    float half_variance;                      // rule 2
    alignas(64) float products[kHeadDimMax];  // q times steps
    int8_t rounded[kHeadDimMax];              // the same, in the order of the words' bytes
  };
  // Fine keys that are scored together, for which there are registers.
  static constexpr int kFineKeys = kVector >= 16 ? 4 : 2;
  struct FineKeys {
    int at[kFineKeys];
    alignas(64) int8_t codes[kFineKeys][kHeadDimMax];
  };

  PlanesFormat f() const { return format_(); }
  int heads() const { return static_cast<int>(heads_.size()); }
  Head* HeadsFrom(int h) { return &heads_[static_cast<size_t>(h)]; }
  const Head* HeadsFrom(int h) const { return &heads_[static_cast<size_t>(h)]; }
  const uint32_t* WordsOf(const std::byte* upper) const {
    return reinterpret_cast<const uint32_t*>(upper + f().key_codes());
  }

  template <int H>
  HWY_NOINLINE void FoldHeads(const std::byte* upper, const float* q, int first) {
    const auto* const minima = reinterpret_cast<const F16*>(upper);
    const auto* const steps = minima + f().dim;
    q += first * f().dim;
    Head* const to = HeadsFrom(first);
    const VF middle = hn::Set(DF(), MiddleCode(f()));
    VF base[H], largest[H], squares[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) base[h] = largest[h] = squares[h] = hn::Zero(DF());
    for (int c = 0; c < f().dim; c += kVector) {
      const VF step = LoadFloats(steps + c);
      const VF mean = hn::MulAdd(step, middle, LoadFloats(minima + c));
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const VF x = hn::LoadU(DF(), q + h * f().dim + c), product = hn::Mul(x, step);
        base[h] = hn::MulAdd(x, mean, base[h]);
        largest[h] = hn::Max(largest[h], hn::Abs(product));
        squares[h] = hn::MulAdd(product, product, squares[h]);
        hn::StoreU(product, DF(), to[h].products + c);
      }
    }
    float bases[kN], most[kN], sums[kN], variances[kN];
    Reduce(base, Plus(), bases);
    Reduce(squares, Plus(), variances);
    Reduce(largest, Larger(), most);
    VF whole[H];
    for (int h = 0; h < H; ++h) {
      const bool none = most[h] < 1e-30f;  // 127 / most has no fp32
      to[h].digit = none ? 0.0f : most[h] * (kCell / 127.0f);
      whole[h] = Round(none ? 0.0f : 127.0f / most[h], to[h]);
    }
    Reduce(whole, Plus(), sums);
    const auto half = static_cast<float>(RoundingVariance(f()) / 2);
    const float middle_digit = (MiddleCode(f()) - kMiddle) / kCell + kMiddleDigit;
    for (int h = 0; h < H; ++h) {
      to[h].base = bases[h];
      to[h].half_variance = half * variances[h];
      to[h].digit_base = bases[h] - middle_digit * to[h].digit * sums[h];
    }
  }

  // Products in 8 bits; returns their sum, in lanes.
  HWY_INLINE VF Round(float inverse, Head& head) const {
    const hn::Repartition<uint8_t, DF> d8;
    alignas(16) static constexpr uint8_t kOrder[16] = {0, 2,  1, 3,  4,  6,  5,  7,
                                                       8, 10, 9, 11, 12, 14, 13, 15};
    const VF by = hn::Set(DF(), inverse), shift = hn::Set(DF(), 12582912.0f);
    // Two vectors' low halves. Where `shift` is added to a number, its low bits are the whole
    // number that it rounds to.
    const auto low = [&](int c) HWY_ATTR {
      const VF a = hn::MulAdd(hn::LoadU(DF(), head.products + c), by, shift);
      const VF b = hn::MulAdd(hn::LoadU(DF(), head.products + c + kVector), by, shift);
      return hn::BitCast(d8, hn::ConcatEven(D16(), hn::BitCast(D16(), b), hn::BitCast(D16(), a)));
    };
    V16 sum = hn::Zero(D16());
    for (int c = 0; c < f().dim; c += 4 * kVector) {
      const auto bytes = hn::ConcatEven(d8, low(c + 2 * kVector), low(c));
      sum = hn::Add(sum, MulBytes(hn::Set(DU(), 0x01010101u), hn::BitCast(DI(), bytes)));
      const auto in_order = hn::TableLookupBytes(bytes, hn::LoadDup128(d8, kOrder));
      hn::StoreU(hn::BitCast(hn::Repartition<int8_t, DF>(), in_order),
                 hn::Repartition<int8_t, DF>(), head.rounded + c);
    }
    return hn::ConvertTo(DF(), SumOfHalves(sum));
  }

  template <typename Dot, int H>
  HWY_NOINLINE void ScoreHeads(const uint32_t* words, const uint32_t* next, float* out,
                               int64_t out_head, int first) const {
    int32_t t = 0;
    for (; t + 2 * kVector <= f().tokens; t += 2 * kVector) {
      ScoreTokens<Dot, H, 2>(words + t, next + t, HeadsFrom(first), out + t, out_head);
    }
    if (t < f().tokens) {
      ScoreTokens<Dot, H, 1>(words + t, next + t, HeadsFrom(first), out + t, out_head);
    }
  }

  // Some vectors of tokens.
  template <typename Dot, int H, int kVectors>
  HWY_INLINE void ScoreTokens(const uint32_t* words, const uint32_t* next, const Head* heads,
                              float* out, int64_t out_head) const {
    constexpr int kHeld = 8;  // words until an int16 is full: each adds up to 8 * 127 * 3
    const int quarter = f().dim / 4;
    VI sums[H][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[h][v] = hn::Zero(DI());
    }
    for (int first = 0; first < f().dim / 16; first += kHeld) {
      hn::VFromD<typename Dot::D> held[H][kVectors];
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) held[h][v] = hn::Zero(typename Dot::D());
      }
      for (int i = first; i < std::min(first + kHeld, f().dim / 16); ++i) {
        const uint32_t* const at = words + i * f().tokens;
        Lines(reinterpret_cast<const std::byte*>(next + i * f().tokens), kVectors * 4 * kVector)
            .AskForAll();
        AddWords<Dot>(hn::LoadU(DU(), at), hn::LoadU(DU(), at + (kVectors - 1) * kVector),
                      heads->rounded + 4 * i, quarter, sizeof(Head), held);
      }
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sums[h][v] = hn::Add(sums[h][v], Dot::Total(held[h][v]));
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const VF factor = hn::Set(DF(), heads[h].digit);
      const VF base = hn::Set(DF(), heads[h].digit_base);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(hn::MulAdd(hn::ConvertTo(DF(), sums[h][v]), factor, base), DF(),
                   out + h * out_head + v * kVector);
      }
    }
  }

  // Keys [first, first + n).
  template <int n>
  HWY_NOINLINE void ScoreFineKeys(const FineKeys& keys, int first, float* out,
                                  int64_t out_head) const {
    ForHeads(heads(), [&]<int H>(int h) HWY_ATTR {
      float sums[n][kN];
      FineDots<H, n>(keys.codes + first, HeadsFrom(h), sums);
#pragma GCC unroll 4
      for (int g = 0; g < H; ++g) {
        float* const to = out + (h + g) * out_head;
        for (int i = 0; i < n; ++i) to[keys.at[first + i]] = HeadsFrom(h)[g].base + sums[i][g];
      }
    });
  }
  template <int H, int n>
  HWY_INLINE void FineDots(const int8_t (*codes)[kHeadDimMax], const Head* heads,
                           float (&sums)[n][kN]) const {
    VF dots[n][H];
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) {
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) dots[i][h] = hn::Zero(DF());
    }
    for (int c = 0; c < f().dim; c += kVector) {
      VF code[n];
#pragma GCC unroll 4
      for (int i = 0; i < n; ++i) code[i] = LoadCodes(codes[i] + c);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const VF product = hn::LoadU(DF(), heads[h].products + c);
#pragma GCC unroll 4
        for (int i = 0; i < n; ++i) dots[i][h] = hn::MulAdd(code[i], product, dots[i][h]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) Reduce(dots[i], Plus(), sums[i]);
  }

  const Format format_;
  int32_t group_ = -1;
  std::vector<Head> heads_;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_KEYS_INL_H_
