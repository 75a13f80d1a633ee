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
#include "kernels/ops/attend_planes/plane_words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

// The query heads of a token, folded with the steps of one group after the other.
class GroupQueries {
 public:
  GroupQueries(int heads, const PlanesFormat& f)
      : f_(f), products_(static_cast<size_t>(heads * f.dim)), sums_(static_cast<size_t>(heads)) {}

  int32_t group() const { return group_; }

  // q [heads][dim], with the logits' scale.
  void Fold(int32_t group, const std::byte* upper, const float* q) {
    group_ = group;
    ForHeads(heads(), [&]<int H>(int h) HWY_ATTR { FoldHeads<H>(upper, q, h); });
  }

  // Coarse logits of all tokens: out[h * out_head + t]. Asks for `next` meanwhile.
  void Score(const std::byte* upper, Lines next, float* out, int64_t out_head) const {
    WithDot([&]<typename Dot>() HWY_ATTR {
      ForHeads(heads(), [&]<int H>(int h) HWY_ATTR {
        ScoreHeads<Dot, H>(upper, h == 0 ? next : Lines(), out + h * out_head, out_head, h);
      });
    });
  }

  // Fine logits of the token whose codes these are: out[h * out_head].
  void ScoreFine(const uint8_t* codes, float* out, int64_t out_head) const {
    ForHeads(heads(), [&]<int H>(int h) HWY_ATTR { ScoreFineHeads<H>(codes, out, out_head, h); });
  }

 private:
  struct Sums {
    float minima, products, largest;  // over channels: q * minimum; of products; their largest size
  };

  int heads() const { return static_cast<int>(sums_.size()); }
  const Sums& SumsOf(int h) const { return sums_[static_cast<size_t>(h)]; }
  float* ProductsOf(int h) { return &products_[static_cast<size_t>(h * f_.dim)]; }
  const float* ProductsOf(int h) const { return &products_[static_cast<size_t>(h * f_.dim)]; }

  template <int H>
  HWY_NOINLINE void FoldHeads(const std::byte* upper, const float* q, int first) {
    const auto* const minima = reinterpret_cast<const F16*>(upper);
    const auto* const steps = minima + f_.dim;
    q += first * f_.dim;
    float* const to = ProductsOf(first);
    VF of_minima[H], of_products[H], largest[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) of_minima[h] = of_products[h] = largest[h] = hn::Zero(DF());
    for (int c = 0; c < f_.dim; c += kVector) {
      const VF minimum = LoadFloats(minima + c);
      const VF cell = hn::Mul(hn::Set(DF(), kCell), LoadFloats(steps + c));
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const VF x = hn::LoadU(DF(), q + h * f_.dim + c), product = hn::Mul(x, cell);
        of_minima[h] = hn::MulAdd(x, minimum, of_minima[h]);
        of_products[h] = hn::Add(of_products[h], product);
        largest[h] = hn::Max(largest[h], hn::Abs(product));
        hn::StoreU(product, DF(), to + h * f_.dim + c);
      }
    }
    float minima_sums[kN], product_sums[kN], most[kN];
    Reduce(of_minima, Plus(), minima_sums);
    Reduce(of_products, Plus(), product_sums);
    Reduce(largest, Larger(), most);
    for (int h = 0; h < H; ++h) {
      sums_[static_cast<size_t>(first + h)] = {minima_sums[h], product_sums[h], most[h]};
    }
  }

  // The heads [first, first + H) in 8 bits.
  template <int H>
  HWY_INLINE void Round(int first, FoldedQueries& folded) const {
    VF whole[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const float largest = SumsOf(first + h).largest;
      const bool none = largest < 1e-30f;  // 127 / largest has no fp32
      const VF inverse = hn::Set(DF(), none ? 0.0f : 127.0f / largest);
      folded.factor[h] = none ? 0.0f : largest / 127.0f;
      const float* const products = ProductsOf(first + h);
      VI sum = hn::Zero(DI());
      for (int c = 0; c < f_.dim; c += 2 * kVector) {
        const VI a = hn::NearestInt(hn::Mul(hn::LoadU(DF(), products + c), inverse));
        const VI b = hn::NearestInt(hn::Mul(hn::LoadU(DF(), products + c + kVector), inverse));
        sum = hn::Add(sum, hn::Add(a, b));
        StoreBytes(a, b, folded.q[h] + c);
      }
      whole[h] = hn::ConvertTo(DF(), sum);
    }
    float rounded[kN];
    Reduce(whole, Plus(), rounded);
    for (int h = 0; h < H; ++h) {
      const Sums& sums = SumsOf(first + h);
      folded.base[h] = sums.minima + sums.products * (kMiddle / kCell) -
                       kMiddleDigit * folded.factor[h] * rounded[h];
    }
  }

  template <typename Dot, int H>
  HWY_NOINLINE void ScoreHeads(const std::byte* upper, Lines next, float* out, int64_t out_head,
                               int first) const {
    FoldedQueries folded;
    Round<H>(first, folded);
    const auto* const words = reinterpret_cast<const uint32_t*>(upper + f_.key_codes());
    int32_t t = 0;
    for (; t + 2 * kVector <= f_.tokens; t += 2 * kVector) {
      ScoreTokens<Dot, H, 2>(words + t, folded, out + t, out_head, next);
    }
    if (t < f_.tokens) ScoreTokens<Dot, H, 1>(words + t, folded, out + t, out_head, next);
    next.AskForAll();
  }

  // Some vectors of tokens.
  template <typename Dot, int H, int kVectors>
  HWY_INLINE void ScoreTokens(const uint32_t* words, const FoldedQueries& folded, float* out,
                              int64_t out_head, Lines& next) const {
    constexpr int kHeld = 8;  // words until an int16 is full: each adds up to 8 * 127 * 3
    const int quarter = f_.dim / 4;
    VI sums[H][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[h][v] = hn::Zero(DI());
    }
    for (int first = 0; first < f_.dim / 16; first += kHeld) {
      hn::VFromD<typename Dot::D> held[H][kVectors];
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) held[h][v] = hn::Zero(typename Dot::D());
      }
      for (int i = first; i < std::min(first + kHeld, f_.dim / 16); ++i) {
        const uint32_t* const at = words + i * f_.tokens;
        next.Ask(3);
        AddWords<Dot>(hn::LoadU(DU(), at), hn::LoadU(DU(), at + (kVectors - 1) * kVector),
                      folded.q[0] + 4 * i, quarter, kHeadDimMax, held);
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
      const VF factor = hn::Set(DF(), folded.factor[h]), base = hn::Set(DF(), folded.base[h]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(hn::MulAdd(hn::ConvertTo(DF(), sums[h][v]), factor, base), DF(),
                   out + h * out_head + v * kVector);
      }
    }
  }

  template <int H>
  HWY_INLINE void ScoreFineHeads(const uint8_t* codes, float* out, int64_t out_head,
                                 int first) const {
    const float* const products = ProductsOf(first);
    VF dots[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) dots[h] = hn::Zero(DF());
    for (int c = 0; c < f_.dim; c += kVector) {
      const VF code = hn::ConvertTo(DF(), LoadCodes(codes + c));
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        dots[h] = hn::MulAdd(code, hn::LoadU(DF(), products + h * f_.dim + c), dots[h]);
      }
    }
    float sums_of_dots[kN];
    Reduce(dots, Plus(), sums_of_dots);
    for (int h = 0; h < H; ++h) {
      const Sums& sums = SumsOf(first + h);
      out[(first + h) * out_head] =
          sums.minima + (sums_of_dots[h] + sums.products * TailOf(f_)) / kCell;
    }
  }

  const PlanesFormat f_;
  int32_t group_ = -1;
  std::vector<float> products_;  // [heads][dim]: q times kCell steps
  std::vector<Sums> sums_;       // [heads]
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_KEYS_INL_H_
