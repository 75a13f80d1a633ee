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

#include <cstring>
#include <vector>

#include "hwy/highway.h"
#include "kernels/ops/pack_planes/planes_format.h"
#include "kernels/ops/score_bits/bits_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int kVector = static_cast<int>(kN);
// A digit of plane 0 counts as kCell (digit - kMiddleDigit) + kMiddle steps: digits count from their
// middle on, for what rounding to whole numbers loses then weighs least.
inline constexpr float kCell = 64, kMiddleDigit = 1.5f, kMiddle = 31.5f + kMiddleDigit * kCell;

// What a fine code counts beyond its digits.
inline float TailOf(const PlanesFormat& f) { return f.keep == 8 ? 0.0f : 7.5f; }

// body.template operator()<H>(h) for heads [h, h + H), all of them.
template <typename Body>
HWY_INLINE void ForHeads(int heads, const Body& body) {
  int h = 0;
  for (; h + 4 <= heads; h += 4) body.template operator()<4>(h);
  for (; h + 2 <= heads; h += 2) body.template operator()<2>(h);
  if (h < heads) body.template operator()<1>(h);
}

template <int kLeft, class D, class V>
HWY_INLINE V Moved(D d, V bits, uint16_t mask) {
  if constexpr (kLeft > 0) bits = hn::ShiftLeft<kLeft>(bits);
  if constexpr (kLeft < 0) bits = hn::ShiftRight<-kLeft>(bits);
  return hn::And(bits, hn::Set(d, mask));
}

// Planes of one token's key or value. coarse: null leaves it out; second: null with keep = 4.
struct CodePlanes {
  const uint8_t* coarse;
  const uint8_t* first;
  const uint8_t* second;

  // The codes of all channels, in order.
  HWY_INLINE void Unpack(int dim, uint8_t* codes) const {
    if (dim == 64) return UnpackBy<16>(dim, codes);  // a plane of two bits is so short
    UnpackBy<32>(dim, codes);
  }

 private:
  template <int kBytes>
  HWY_INLINE void UnpackBy(int dim, uint8_t* codes) const {
    const hn::CappedTag<uint8_t, kBytes> d8;
    const hn::Repartition<uint16_t, decltype(d8)> d16;
    const auto load = [&](const uint8_t* plane, int at) HWY_ATTR {
      return plane == nullptr ? hn::Zero(d16) : hn::BitCast(d16, hn::LoadU(d8, plane + at));
    };
    alignas(16) static constexpr uint8_t kOrder[16] = {0, 2,  1, 3,  4,  6,  5,  7,
                                                       8, 10, 9, 11, 12, 14, 13, 15};
    const auto order = hn::LoadDup128(d8, kOrder);
    const int quarter = dim / 4;
    for (int b = 0; b < quarter; b += static_cast<int>(hn::MaxLanes(d8))) {
      const auto high = load(coarse, b), middle = load(first, b);
      const auto low = load(second, b), low2 = load(second, b + quarter);
      const auto store = [&](int run, auto digits) HWY_ATTR {
        const auto in_order = hn::TableLookupBytes(hn::BitCast(d8, digits), order);
        hn::StoreU(in_order, d8, codes + run * quarter + b);
      };
      store(0, hn::Or3(Moved<6>(d16, high, 0xC0C0), Moved<4>(d16, middle, 0x3030),
                       Moved<0>(d16, low, 0x0F0F)));
      store(1, hn::Or3(Moved<4>(d16, high, 0xC0C0), Moved<2>(d16, middle, 0x3030),
                       Moved<0>(d16, low2, 0x0F0F)));
      store(2, hn::Or3(Moved<2>(d16, high, 0xC0C0), Moved<0>(d16, middle, 0x3030),
                       Moved<-4>(d16, low, 0x0F0F)));
      store(3, hn::Or3(Moved<0>(d16, high, 0xC0C0), Moved<-2>(d16, middle, 0x3030),
                       Moved<-4>(d16, low2, 0x0F0F)));
    }
  }
};

// A vector of numbers from bytes, at p.
HWY_INLINE VI LoadCodes(const uint8_t* p) {
  const hn::Rebind<uint8_t, DF> d8;
  return hn::PromoteTo(DI(), hn::LoadU(d8, p));
}

// The query heads of a token, folded with the steps of one group after the other.
class GroupQueries {
 public:
  GroupQueries(int heads, const PlanesFormat& f)
      : f_(f),
        products_(static_cast<size_t>(heads * f.dim)),
        sums_(static_cast<size_t>(heads)) {}

  int32_t group() const { return group_; }

  // q [heads][dim], with the logits' scale.
  void Fold(int32_t group, const std::byte* upper, const float* q) {
    group_ = group;
    ForHeads(heads(), [&]<int H>(int h) HWY_ATTR { FoldHeads<H>(upper, q, h); });
  }

  // Coarse logits of all tokens: out[h * out_head + t]. Asks for the keys of `next` meanwhile.
  void Score(const std::byte* upper, const std::byte* next, float* out, int64_t out_head) const {
    ForHeads(heads(), [&]<int H>(int h) HWY_ATTR {
      ScoreHeads<H>(upper, h == 0 ? next : nullptr, out + h * out_head, out_head, h);
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
  float* ProductsOf(int h) { return &products_[static_cast<size_t>(h * f_.dim)]; }
  const float* ProductsOf(int h) const { return &products_[static_cast<size_t>(h * f_.dim)]; }

  template <int H>
  HWY_NOINLINE void FoldHeads(const std::byte* upper, const float* q, int first) {
    const auto* const minima = reinterpret_cast<const F16*>(upper);
    const auto* const steps = minima + f_.dim;
    q += first * f_.dim;
    float* const to = ProductsOf(first);
    VF of_minima[H], of_products[H], largest[H];
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
    for (int h = 0; h < H; ++h) {
      sums_[static_cast<size_t>(first + h)] = {hn::GetLane(hn::SumOfLanes(DF(), of_minima[h])),
                                               hn::GetLane(hn::SumOfLanes(DF(), of_products[h])),
                                               hn::GetLane(hn::MaxOfLanes(DF(), largest[h]))};
    }
  }

  // Head `head` in 8 bits, as number `to` of those that are scored at once.
  HWY_INLINE void Round(int head, int to, FoldedQueries& folded) const {
    const Sums& sums = sums_[static_cast<size_t>(head)];
    const bool none = sums.largest < 1e-30f;  // 127 / largest has no fp32
    const VF inverse = hn::Set(DF(), none ? 0.0f : 127.0f / sums.largest);
    const float factor = none ? 0.0f : sums.largest / 127.0f;
    const float* const products = ProductsOf(head);
    VI whole = hn::Zero(DI());
    for (int c = 0; c < f_.dim; c += 2 * kVector) {
      const VI a = hn::NearestInt(hn::Mul(hn::LoadU(DF(), products + c), inverse));
      const VI b = hn::NearestInt(hn::Mul(hn::LoadU(DF(), products + c + kVector), inverse));
      whole = hn::Add(whole, hn::Add(a, b));
      StoreBytes(a, b, folded.q[to] + c);
    }
    const auto rounded = static_cast<float>(hn::GetLane(hn::SumOfLanes(DI(), whole)));
    folded.factor[to] = factor;
    folded.base[to] =
        sums.minima + sums.products * (kMiddle / kCell) - kMiddleDigit * factor * rounded;
  }

  template <int H>
  HWY_NOINLINE void ScoreHeads(const std::byte* upper, const std::byte* next, float* out,
                               int64_t out_head, int first) const {
    const QuantisedGroup keys{f_.dim, 2, f_.tokens};
    FoldedQueries folded;
    for (int h = 0; h < H; ++h) Round(first + h, h, folded);
    const int64_t share = f_.value_minimum() * kVector / f_.tokens;
    for (int32_t t = 0; t < f_.tokens; t += kVector) {
      Prefetch(next, t / kVector * share, (t / kVector + 1) * share);
      ScoreVector<2, H>(keys, upper, t, folded, out + t, out_head);
    }
  }

  template <int H>
  HWY_INLINE void ScoreFineHeads(const uint8_t* codes, float* out, int64_t out_head,
                                 int first) const {
    const float* const products = ProductsOf(first);
    VF dots[H];
    for (int h = 0; h < H; ++h) dots[h] = hn::Zero(DF());
    for (int c = 0; c < f_.dim; c += kVector) {
      const VF code = hn::ConvertTo(DF(), LoadCodes(codes + c));
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        dots[h] = hn::MulAdd(code, hn::LoadU(DF(), products + h * f_.dim + c), dots[h]);
      }
    }
    for (int h = 0; h < H; ++h) {
      const Sums& sums = sums_[static_cast<size_t>(first + h)];
      const float dot = hn::GetLane(hn::SumOfLanes(DF(), dots[h]));
      out[(first + h) * out_head] = sums.minima + (dot + sums.products * TailOf(f_)) / kCell;
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
