// SPDX-License-Identifier: Apache-2.0
// What the simd ops share: rows of bf16, fp16 or fp32 as fp32 vectors, dot products of a few rows
// with a few queries, and exp. Included once per Highway target, after hwy/highway.h.
//
// "Pair order": the order in which LoadPair delivers channels. bf16 is split into even and odd
// channels of each 2N (two cheap bit operations a 2N, where widening takes shuffles); other types
// keep their order. A dot product only needs the query in the same order; sums over rows are put
// back by FromPairOrder at the end.
#if defined(KVSTRATA_KERNELS_OPS_SIMD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_SIMD_ROWS_INL_H_
#undef KVSTRATA_KERNELS_OPS_SIMD_ROWS_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_SIMD_ROWS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/pages/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::VFromD<DF>;

// Lanes; every target we build has a fixed width.
inline constexpr size_t kN = hn::MaxLanes(DF());
inline constexpr int kHeadDimMax = 256;

// The N elements at p as fp32, in order; one by one for types that no instruction below widens.
template <typename T>
HWY_INLINE VF LoadFloats(const T* p) {
  float lanes[kN];
  for (size_t i = 0; i < kN; ++i) lanes[i] = ToFloat(p[i]);
  return hn::LoadU(DF(), lanes);
}

template <>
HWY_INLINE VF LoadFloats<float>(const float* p) {
  return hn::LoadU(DF(), p);
}

template <>
HWY_INLINE VF LoadFloats<BF16>(const BF16* p) {
  const hn::Rebind<uint16_t, DF> d16;
  const auto bits = hn::PromoteTo(DU(), hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
}

template <>
HWY_INLINE VF LoadFloats<F16>(const F16* p) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(DF(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#else
  // Highway's own emulation turns infinities into 65536. Shifted into place, an fp16 is an fp32
  // that is 2^112 too small, subnormals included; above 65504 it was an infinity or a NaN.
  const hn::Rebind<uint16_t, DF> d16;
  const auto bits = hn::PromoteTo(DU(), hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(DU(), 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(DU(), 0x7FFFu)));
  const VF scaled = hn::Mul(hn::BitCast(DF(), magnitude), hn::Set(DF(), 0x1p112f));
  const auto infinite = hn::Gt(scaled, hn::Set(DF(), 65504.0f));
  const VF high = hn::BitCast(DF(), hn::Or(magnitude, hn::Set(DU(), 0x7F800000u)));
  return hn::Or(hn::IfThenElse(infinite, high, scaled), hn::BitCast(DF(), sign));
#endif
}

// The 2N elements at p as fp32, in pair order.
template <typename T>
HWY_INLINE void LoadPair(const T* p, VF& a, VF& b) {
  a = LoadFloats(p);
  b = LoadFloats(p + kN);
}

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
template <>
HWY_INLINE void LoadPair<BF16>(const BF16* p, VF& a, VF& b) {
  const hn::Repartition<uint8_t, DU> d8;
  const auto bits = hn::BitCast(DU(), hn::LoadU(d8, reinterpret_cast<const uint8_t*>(p)));
  a = hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
  b = hn::BitCast(DF(), hn::And(bits, hn::Set(DU(), 0xFFFF0000u)));
}
#endif

// in, out [dim]; dim a multiple of 2N; out is not in.
template <typename T>
HWY_INLINE void ToPairOrder(const float* in, float* out, int dim) {
  for (int c = 0; c < dim; ++c) out[c] = in[c];
}
template <>
HWY_INLINE void ToPairOrder<BF16>(const float* in, float* out, int dim) {
  constexpr int n = static_cast<int>(kN);
  for (int c = 0; c < dim; c += 2 * n) {
    for (int i = 0; i < n; ++i) {
      out[c + i] = in[c + 2 * i];
      out[c + n + i] = in[c + 2 * i + 1];
    }
  }
}

// In place.
template <typename T>
HWY_INLINE void FromPairOrder(float*, int) {}
template <>
HWY_INLINE void FromPairOrder<BF16>(float* row, int dim) {
  constexpr int n = static_cast<int>(kN);
  float chunk[2 * n];
  for (int c = 0; c < dim; c += 2 * n) {
    for (int i = 0; i < n; ++i) {
      chunk[2 * i] = row[c + i];
      chunk[2 * i + 1] = row[c + n + i];
    }
    for (int i = 0; i < 2 * n; ++i) row[c + i] = chunk[i];
  }
}

// Sums pairs: n accumulators of partial sums to n / 2, down to one.
template <size_t n>
HWY_INLINE void SumPairs(VF (&acc)[kN]) {
#pragma GCC unroll 8
  for (size_t i = 0; i < n / 2; ++i) {
    acc[i] = hn::Add(hn::ConcatEven(DF(), acc[2 * i + 1], acc[2 * i]),
                     hn::ConcatOdd(DF(), acc[2 * i + 1], acc[2 * i]));
  }
  if constexpr (n > 2) SumPairs<n / 2>(acc);
}

// Lane i of the answer is the sum of the lanes of acc[i]; a tree, always the same.
HWY_INLINE VF SumEach(VF (&acc)[kN]) {
  SumPairs<kN>(acc);
  return acc[0];
}

// Lane h * R + r of the answer is query h . row r; q [H][q_stride] in T's pair order.
template <typename T, int R, int H>
HWY_INLINE VF DotRows(const std::byte* const* rows, const float* q, int q_stride, int dim) {
  static_assert(R * H <= static_cast<int>(kN));
  VF acc[kN];
#pragma GCC unroll 16
  for (size_t i = 0; i < kN; ++i) acc[i] = hn::Zero(DF());
  for (int c = 0; c < dim; c += 2 * static_cast<int>(kN)) {
    VF a[R], b[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) LoadPair(reinterpret_cast<const T*>(rows[r]) + c, a[r], b[r]);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const VF qa = hn::LoadU(DF(), q + h * q_stride + c);
      const VF qb = hn::LoadU(DF(), q + h * q_stride + c + kN);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        acc[h * R + r] = hn::MulAdd(qb, b[r], hn::MulAdd(qa, a[r], acc[h * R + r]));
      }
    }
  }
  return SumEach(acc);
}

// exp(x) for x <= 0 within 2 ulp; exp(-inf) = 0, below about -87.3 it is 0, NaN stays NaN.
HWY_INLINE VF ExpNonPositive(VF x) {
  const DF d;
  const VF low = hn::Set(d, -87.3f);
  const auto underflow = hn::Lt(x, low);
  // The second operand is what x86 returns for a NaN.
  const VF clamped = hn::Max(low, x);
  // Adding 1.5 * 2^23 + 127 rounds to a whole number and leaves it, biased, in the low bits.
  const VF magic = hn::Set(d, 12582912.0f + 127.0f);
  const VF biased = hn::Add(hn::Mul(clamped, hn::Set(d, 1.44269504088896341f)), magic);
  const VF n = hn::Sub(biased, magic);
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // Cephes expf: 1 + r + r^2 * p(r) on [-ln2/2, ln2/2].
  VF p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const VF power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(DI(), biased)));
  return hn::IfThenElse(underflow, hn::Zero(d), hn::Mul(p, power));
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_SIMD_ROWS_INL_H_
