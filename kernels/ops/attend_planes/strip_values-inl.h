// SPDX-License-Identifier: Apache-2.0
// Values of strips of planes, summed by the weights of the query heads of one token: plane 0 in
// whole numbers, fine tokens in fp32. Included once per Highway target, by op attend_planes.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_VALUES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_VALUES_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_VALUES_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_VALUES_INL_H_
#endif

#include <cmath>
#include <limits>
#include <vector>

#include "hwy/highway.h"
#include "kernels/ops/attend_planes/strip_block-inl.h"
#include "kernels/ops/pack_planes/plane_digits.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

template <typename Format>
class ValueSums {
 public:
  ValueSums(int heads, const Format& format)
      : format_(format),
        heads_(static_cast<size_t>(heads)),
        o_(static_cast<size_t>(heads * f().dim)) {}

  // Logits: of token t of the group and head h at [h * head_stride + t].
  void Add(const StripBlock& block, const float* logits, int64_t head_stride) {
    scales_.Read(block, f());
    ForHeads(heads(), [&]<int H>(int h) HWY_ATTR {
      Weigh<H>(block, logits + h * head_stride, head_stride, &heads_[Index(h)]);
    });
    if (scales_.coarse) {
      WithDot([&]<typename Dot>() HWY_ATTR {
        ForHeads(heads(), [&]<int H>(int h) HWY_ATTR { AddCoarse<Dot, H>(block, h); });
      });
    }
    AddFine(block);
  }

  float m(int h) const { return heads_[Index(h)].m; }
  float l(int h) const { return SumOf(heads_[Index(h)].l); }
  // o [dim], rotated back.
  void Output(int h, float* o) const {
    const float constant = SumOf(heads_[Index(h)].constant);
    for (int c = 0; c < f().dim; ++c) o[c] = OutputOf(h)[c] + constant;
    RotateHadamard(o, f().dim);
  }

 private:
  struct Head {
    float m = -std::numeric_limits<float>::infinity();
    float l[kN] = {}, constant[kN] = {};  // by lane; every channel of the output gets the constant
    float factor;                         // what `whole` counts
    float steps[kBlockTokens];            // weights times steps
    uint8_t
        whole[kBlockTokens];  // weights times steps; token 4 j + i of a strip: byte 4 j + kOrder[i]
  };

  PlanesFormat f() const { return format_(); }
  static size_t Index(int h) { return static_cast<size_t>(h); }
  static float SumOf(const float* lanes) {
    return hn::GetLane(hn::SumOfLanes(DF(), hn::LoadU(DF(), lanes)));
  }
  int heads() const { return static_cast<int>(heads_.size()); }
  float* OutputOf(int h) { return &o_[Index(h * f().dim)]; }
  const float* OutputOf(int h) const { return &o_[Index(h * f().dim)]; }
  const uint32_t* WordsOf(const StripBlock& block, int strip) const {
    const auto* const words = reinterpret_cast<const uint32_t*>(block.upper + f().value_codes());
    return words + block.first[strip] / kStripTokens * f().dim;
  }

  void Rescale(Head& head, float top) {
    const VF by = hn::Set(DF(), std::exp(head.m - top));
    float* const o = OutputOf(static_cast<int>(&head - heads_.data()));
    head.m = top;
    for (float* lanes : {head.l, head.constant}) {
      hn::StoreU(hn::Mul(hn::LoadU(DF(), lanes), by), DF(), lanes);
    }
    for (int c = 0; c < f().dim; c += kVector) {
      hn::StoreU(hn::Mul(hn::LoadU(DF(), o + c), by), DF(), o + c);
    }
  }

  // Logits of heads become weights; what is not fine of them, in whole numbers.
  template <int H>
  HWY_NOINLINE void Weigh(const StripBlock& block, const float* logits, int64_t head_stride,
                          Head* heads) {
    RaiseTops<H>(block, logits, head_stride, heads);
    float products[H][kBlockTokens];
    VF shift[H], l[H], constant[H], largest[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      shift[h] = hn::Set(DF(), heads[h].m);
      l[h] = hn::LoadU(DF(), heads[h].l);
      constant[h] = hn::LoadU(DF(), heads[h].constant);
      largest[h] = hn::Zero(DF());
    }
    for (int i = 0; i < block.count; ++i) {
      for (int j = 0; j < kStripTokens; j += kVector) {
        const int to = i * kStripTokens + j;
        const VF step = hn::LoadU(DF(), scales_.step + to);
        const VF cell = hn::LoadU(DF(), scales_.cell + to);
        const VF mean = hn::LoadU(DF(), scales_.mean + to);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          const VF x = hn::LoadU(DF(), logits + h * head_stride + block.first[i] + j);
          const VF weight = ExpNonPositive(hn::Sub(x, shift[h]));
          const VF product = hn::Mul(weight, cell);
          l[h] = hn::Add(l[h], weight);
          constant[h] = hn::MulAdd(weight, mean, constant[h]);
          largest[h] = hn::Max(largest[h], product);
          hn::StoreU(hn::Mul(weight, step), DF(), heads[h].steps + to);
          hn::StoreU(product, DF(), products[h] + to);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      hn::StoreU(l[h], DF(), heads[h].l);
      hn::StoreU(constant[h], DF(), heads[h].constant);
    }
    if (scales_.coarse) Round<H>(products, block.count * kStripTokens, largest, heads);
  }

  template <int H>
  HWY_INLINE void RaiseTops(const StripBlock& block, const float* logits, int64_t head_stride,
                            Head* heads) {
    VF tops[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      tops[h] = hn::Set(DF(), heads[h].m);
      for (int i = 0; i < block.count; ++i) {
        for (int j = 0; j < kStripTokens; j += kVector) {
          const VF x = hn::LoadU(DF(), logits + h * head_stride + block.first[i] + j);
          tops[h] = hn::Max(x, tops[h]);  // which a NaN leaves as it is
        }
      }
    }
    float top[kN];
    Reduce(tops, Larger(), top);
    for (int h = 0; h < H; ++h) {
      if (top[h] > heads[h].m) Rescale(heads[h], top[h]);
    }
  }

  // n products of each head in 8 bits, by their largest. Digits count from their middle on.
  template <int H>
  HWY_INLINE void Round(float (&products)[H][kBlockTokens], int n, const VF (&largest)[H],
                        Head* heads) {
    float top[kN];
    Reduce(largest, Larger(), top);
    for (int h = 0; h < H; ++h) {
      const bool none = !(top[h] >= 1e-30f);  // 255 / top has no fp32
      const VF inverse = hn::Set(DF(), none ? 0.0f : 255.0f / top[h]);
      heads[h].factor = none ? 0.0f : top[h] / 255.0f;
      if (n % (2 * kVector) != 0) hn::StoreU(hn::Zero(DF()), DF(), products[h] + n);
      VI sum = hn::Zero(DI());
      for (int i = 0; i < n; i += 2 * kVector) {
        const VI a = hn::NearestInt(hn::Mul(hn::LoadU(DF(), products[h] + i), inverse));
        const VI b = hn::NearestInt(hn::Mul(hn::LoadU(DF(), products[h] + i + kVector), inverse));
        sum = hn::Add(sum, hn::Add(a, b));
        StoreBytes(a, b, heads[h].whole + i);
      }
      const VF middle = hn::Set(DF(), kMiddleDigit * heads[h].factor);
      const VF constant = hn::LoadU(DF(), heads[h].constant);
      hn::StoreU(hn::NegMulAdd(hn::ConvertTo(DF(), sum), middle, constant), DF(),
                 heads[h].constant);
    }
  }

  // Plane 0 of the values, by the heads [first, first + H).
  template <typename Dot, int H>
  HWY_NOINLINE void AddCoarse(const StripBlock& block, int first) {
    const Head* const heads = &heads_[Index(first)];
    float* const o = OutputOf(first);
    const uint32_t* words[kBlockStrips];
    for (int i = 0; i < block.count; ++i) words[i] = WordsOf(block, i);
    constexpr int kVectors = 2;
    const int dim = f().dim;
    for (int c = 0; c < dim; c += kVectors * kVector) {
      hn::VFromD<typename Dot::D> sums[H][kVectors];
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[h][v] = hn::Zero(typename Dot::D());
      }
      for (int i = 0; i < block.count; ++i) {
        AddWords<Dot>(hn::LoadU(DU(), words[i] + c), hn::LoadU(DU(), words[i] + c + kVector),
                      heads->whole + i * kStripTokens, 4, sizeof(Head), sums);
      }
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const VF factor = hn::Set(DF(), heads[h].factor);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const VF sum = hn::ConvertTo(DF(), Dot::Total(sums[h][v]));
          float* const to = o + h * dim + c + v * kVector;
          hn::StoreU(hn::MulAdd(sum, factor, hn::LoadU(DF(), to)), DF(), to);
        }
      }
    }
  }

  HWY_NOINLINE void AddFine(const StripBlock& block) {
    const auto* const lower = reinterpret_cast<const uint8_t*>(block.lower) + f().row_bytes() / 2;
    for (int i = 0; i < block.count; ++i) {
      if (block.fine[i] == 0) continue;
      digits_.Read(WordsOf(block, i), f().dim);
      int n = 0;
      ForBits(block.fine[i], [&](int t) HWY_ATTR {
        Unpack(f(), digits_.Of(t), lower + (block.first[i] + t) * f().row_bytes(), codes_[n]);
        at_[n++] = i * kStripTokens + t;
      });
      ForHeads(heads(), [&]<int H>(int h) HWY_ATTR { AddFineHeads<H>(n, h); });
    }
  }

  // The first n of the unpacked values, to the heads [first, first + H).
  template <int H>
  HWY_INLINE void AddFineHeads(int n, int first) {
    constexpr int kVectors = 2;
    float* const o = OutputOf(first);
    const int dim = f().dim;
    for (int c = 0; c < dim; c += kVectors * kVector) {
      VF sums[H][kVectors];
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sums[h][v] = hn::LoadU(DF(), o + h * dim + c + v * kVector);
        }
      }
      for (int i = 0; i < n; ++i) {
        const VF code = LoadCodes(codes_[i] + c), code2 = LoadCodes(codes_[i] + c + kVector);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          const VF by = hn::Set(DF(), heads_[Index(first + h)].steps[at_[i]]);
          sums[h][0] = hn::MulAdd(code, by, sums[h][0]);
          sums[h][1] = hn::MulAdd(code2, by, sums[h][1]);
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          hn::StoreU(sums[h][v], DF(), o + h * dim + c + v * kVector);
        }
      }
    }
  }

  const Format format_;
  std::vector<Head> heads_;
  std::vector<float> o_;  // [heads][dim], rotated
  StripScales scales_;    // the block's
  // What a strip's fine tokens' values are made of, and these.
  StripDigits digits_;
  int at_[kStripTokens];  // the block's
  alignas(64) int8_t codes_[kStripTokens][kHeadDimMax];
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_VALUES_INL_H_
