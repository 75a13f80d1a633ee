// SPDX-License-Identifier: Apache-2.0
// Words of planes: products of their codes with bytes, codes of one row unpacked, flags as bits,
// and sums over lanes. Included once per Highway target, by op attend_planes.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_WORDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_WORDS_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_WORDS_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_WORDS_INL_H_
#endif

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/ops/pack_planes/planes_format.h"
#include "kernels/ops/score_bits/bits_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int kVector = static_cast<int>(kN);
// A digit of plane 0 counts as kCell (digit - kMiddleDigit) + kMiddle steps: digits count from
// their middle on, for what rounding to whole numbers loses then weighs least.
inline constexpr float kCell = 64, kMiddleDigit = 1.5f, kMiddle = 31.5f + kMiddleDigit * kCell;

// Lines of memory that are read soon, asked for a few at a time: a core has a dozen on their way,
// and waits where it is to ask for more. They wait in L2. Inlined, for compilers leave out calls of
// a function that does nothing else.
class Lines {
 public:
  Lines() = default;
  Lines(const std::byte* from, int64_t bytes) : at_(from), end_(from + bytes) {}

  HWY_INLINE void AskForAll() {
    for (; at_ < end_; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const std::byte* at_ = nullptr;
  const std::byte* end_ = nullptr;
};

// A work item's format: what compilers know of the one that most have, and any other.
struct UsualFormat {
  constexpr PlanesFormat operator()() const { return {128, 64, 8}; }
};
struct AnyFormat {
  PlanesFormat format;
  PlanesFormat operator()() const { return format; }
};

// Fine codes are unpacked as signed bytes; a byte of 0 counts as so many steps.
inline constexpr int kSignedCode = 128;
inline float MiddleCode(const PlanesFormat& f) {
  return static_cast<float>(kSignedCode) + (f.keep == 8 ? 0.0f : 7.5f);
}

// Sums of products of unsigned bytes with signed ones, lane by lane. kIsWhole: product and sum stay
// together, where compilers would add products to each other first, for which there are no
// registers.
struct DotByPairs {
  using D = D16;
  static constexpr bool kIsWhole = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3;

  static HWY_INLINE V16 Add(V16 sum, VU a, VI b) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
    decltype(sum.raw) product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
        : "+v"(sum.raw), "=&v"(product)
        : "v"(a.raw), "v"(b.raw));
    return sum;
#else
    return hn::Add(sum, MulBytes(a, b));
#endif
  }
  static HWY_INLINE VI Total(V16 sum) { return SumOfHalves(sum); }
};

#if HWY_TARGET == HWY_AVX3
// The same by one instruction. Highway's target for it, AVX3_DL, wants more than CPUs with it have.
struct DotByVnni {
  using D = DI;
  static constexpr bool kIsWhole = true;

  static HWY_INLINE VI Add(VI sum, VU a, VI b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
  static HWY_INLINE VI Total(VI sum) { return sum; }
};

inline bool HasVnni() {
  static const bool has = (__builtin_cpu_init(), __builtin_cpu_supports("avx512vnni") != 0);
  return has;
}
#endif

// body.template operator()<Dot>(), by the faster one.
template <typename Body>
HWY_INLINE void WithDot(const Body& body) {
#if HWY_TARGET == HWY_AVX3
  if (HasVnni()) return body.template operator()<DotByVnni>();
#endif
  body.template operator()<DotByPairs>();
}

// Adds to `sums` [H][V] the products of V vectors of words, each of four runs of codes, with the
// bytes of H heads: signed or unsigned ones, of run m and head h at bytes[m * run + h * head].
template <typename Dot, int H, int V, typename Byte>
HWY_INLINE void AddWords(VU word, VU word2, const Byte* bytes, int64_t run, int64_t head,
                         hn::VFromD<typename Dot::D> (&sums)[H][V]) {
  const VU mask = hn::Set(DU(), 0x03030303u);
  const auto add = [&](VU codes, VU codes2, const Byte* of_run) HWY_ATTR {
    const auto one = [&](auto& sum, VU by, VU four) HWY_ATTR {
      if constexpr (std::is_signed_v<Byte>) {
        sum = Dot::Add(sum, by, hn::BitCast(DI(), four));
      } else {
        sum = Dot::Add(sum, four, hn::BitCast(DI(), by));
      }
    };
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      uint32_t four;
      std::memcpy(&four, of_run + h * head, 4);
      one(sums[h][0], codes, hn::Set(DU(), four));
      if constexpr (V == 2) one(sums[h][1], codes2, hn::Set(DU(), four));
    }
  };
  const auto add_run = [&](int m) HWY_ATTR {
    add(hn::And(word, mask), hn::And(word2, mask), bytes + m * run);
    word = hn::ShiftRight<2>(word);
    word2 = hn::ShiftRight<2>(word2);
  };
  if constexpr (Dot::kIsWhole) {
    add_run(0), add_run(1), add_run(2), add_run(3);
  } else {
#pragma GCC unroll 1
    for (int m = 0; m < 4; ++m) add_run(m);
  }
}

struct Plus {
  HWY_INLINE VF operator()(VF a, VF b) const { return hn::Add(a, b); }
};
struct Larger {
  HWY_INLINE VF operator()(VF a, VF b) const { return hn::Max(a, b); }
};
// Lane h of the answer, up to H <= 4, is what all lanes of x[h] come to.
template <int H, typename Op>
HWY_INLINE VF Reduced(const VF (&x)[H], const Op& op) {
  const hn::Repartition<double, DF> d64;
  const auto halves = [&](VF a, VF b) HWY_ATTR {
    return op(hn::InterleaveLower(a, b), hn::InterleaveUpper(DF(), a, b));
  };
  const auto low = hn::BitCast(d64, halves(x[0], x[H > 1 ? 1 : 0]));
  const auto high = hn::BitCast(d64, halves(x[H > 2 ? 2 : 0], x[H > 3 ? 3 : 0]));
  VF four = op(hn::BitCast(DF(), hn::InterleaveLower(low, high)),
               hn::BitCast(DF(), hn::InterleaveUpper(d64, low, high)));
#if HWY_MAX_BYTES > 16
  if constexpr (kVector > 4) four = op(four, hn::ReverseBlocks(DF(), four));
  if constexpr (kVector > 8) four = op(four, hn::SwapAdjacentBlocks(four));
#endif
  return four;
}
template <int H, typename Op>
HWY_INLINE void Reduce(const VF (&x)[H], const Op& op, float (&to)[kN]) {
  hn::StoreU(Reduced(x, op), DF(), to);
}

// body.template operator()<H>(h) for heads [h, h + H), all of them.
template <typename Body>
HWY_INLINE void ForHeads(int heads, const Body& body) {
  int h = 0;
  for (; h + 4 <= heads; h += 4) body.template operator()<4>(h);
  for (; h + 2 <= heads; h += 2) body.template operator()<2>(h);
  if (h < heads) body.template operator()<1>(h);
}

template <int kLeft, class V>
HWY_INLINE V ShiftedLeft(V bits) {
  if constexpr (kLeft < 0) return hn::ShiftRight<-kLeft>(bits);
  return hn::ShiftLeft<(kLeft > 0 ? kLeft : 0)>(bits);
}

// Bytes of each four are channels 0, 2, 1, 3.
alignas(16) inline constexpr uint8_t kByteOrder[16] = {0, 2,  1, 3,  4,  6,  5,  7,
                                                       8, 10, 9, 11, 12, 14, 13, 15};
// Flips the upper bit of each digit of two bits: what makes codes signed.
inline constexpr uint32_t kFlipDigits = 0xAAAAAAAAu;

// Plane 0 of one token's key, whose words lie `apart` numbers apart.
struct KeyDigits {
  const int32_t* words;
  int32_t apart;

  // The digits of a run's channels from `at` on, in place among other bits, are what it returns
  // called by the run.
  template <class D16>
  HWY_INLINE auto At(D16 d16, int at) const {
    const hn::Repartition<int32_t, D16> d32;
    const hn::Repartition<uint8_t, D16> d8;
    const auto from = hn::Mul(hn::Iota(d32, 0), hn::Set(d32, apart));
    const auto gathered = hn::GatherIndex(d32, words + at / 4 * apart, from);
    const auto flipped = hn::Xor(hn::BitCast(d16, gathered), hn::Set(d16, kFlipDigits & 0xFFFF));
    const auto digits = hn::BitCast(
        d16, hn::TableLookupBytes(hn::BitCast(d8, flipped), hn::LoadDup128(d8, kByteOrder)));
    return [=]<int kRun>() HWY_ATTR { return ShiftedLeft<6 - 2 * kRun>(digits); };
  }
};

// The codes of a token's key or value, of all channels in order. lower: its half of the row.
template <int kBytes, typename Digits>
HWY_INLINE void UnpackBy(const PlanesFormat& f, const Digits& coarse, const uint8_t* lower,
                         int8_t* codes) {
  const hn::CappedTag<uint8_t, kBytes> d8;
  const hn::Repartition<uint16_t, decltype(d8)> d16;
  const auto order = hn::LoadDup128(d8, kByteOrder);
  const auto load = [&](int at) HWY_ATTR {
    return hn::BitCast(d16, hn::TableLookupBytes(hn::LoadU(d8, lower + at), order));
  };
  const int quarter = f.dim / 4;
  for (int b = 0; b < quarter; b += static_cast<int>(hn::MaxLanes(d8))) {
    const auto high = coarse.At(d16, b);
    const auto middle = load(b);
    const auto low = f.keep == 8 ? load(quarter + b) : hn::Zero(d16);
    const auto low2 = f.keep == 8 ? load(2 * quarter + b) : hn::Zero(d16);
    const auto store = [&]<int kRun>(auto digits, auto low_digits) HWY_ATTR {
      const auto upper = hn::OrAnd(hn::And(low_digits, hn::Set(d16, 0x0F0F)),
                                   ShiftedLeft<4 - 2 * kRun>(middle), hn::Set(d16, 0x3030));
      const auto code = hn::OrAnd(upper, digits.template operator()<kRun>(), hn::Set(d16, 0xC0C0));
      hn::StoreU(hn::BitCast(d8, code), d8, reinterpret_cast<uint8_t*>(codes) + kRun * quarter + b);
    };
    store.template operator()<0>(high, low);
    store.template operator()<1>(high, low2);
    store.template operator()<2>(high, hn::ShiftRight<4>(low));
    store.template operator()<3>(high, hn::ShiftRight<4>(low2));
  }
}
template <typename Digits>
HWY_INLINE void Unpack(const PlanesFormat& f, const Digits& coarse, const uint8_t* lower,
                       int8_t* codes) {
  if (f.dim == 64) return UnpackBy<16>(f, coarse, lower, codes);  // a plane of two bits is so short
  UnpackBy<32>(f, coarse, lower, codes);
}

// A vector of codes as numbers.
HWY_INLINE VF LoadCodes(const int8_t* p) {
  const hn::Rebind<int8_t, DF> d8;
  return hn::ConvertTo(DF(), hn::PromoteTo(DI(), hn::LoadU(d8, p)));
}

// Flags of a strip as bits.
HWY_INLINE uint32_t BitsOf(const uint8_t* flags) {
  const hn::CappedTag<uint8_t, kStripTokens> d8;
  uint8_t bits[8] = {};
  hn::StoreMaskBits(d8, hn::Ne(hn::LoadU(d8, flags), hn::Zero(d8)), bits);
  return bits[0] | static_cast<uint32_t>(bits[1]) << 8;
}
// body(t) for the bits that are set.
template <typename Body>
HWY_INLINE void ForBits(uint32_t bits, const Body& body) {
  for (; bits != 0; bits &= bits - 1) body(std::countr_zero(bits));
}

// The largest of n numbers; NaN counts as nothing.
HWY_INLINE float LargestOf(const float* x, int n) {
  VF top = hn::Set(DF(), -std::numeric_limits<float>::infinity());
  int i = 0;
  for (; i + kVector <= n; i += kVector) top = hn::Max(hn::LoadU(DF(), x + i), top);
  float largest = hn::GetLane(hn::MaxOfLanes(DF(), top));
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANE_WORDS_INL_H_
