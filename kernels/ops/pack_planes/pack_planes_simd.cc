// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/pack_planes/pack_planes_simd.cc"
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/ops/quantise_keys/codes-inl.h"
#include "kernels/ops/quantise_keys/half_range.h"
#include "kernels/pages/element.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

inline constexpr int kVector = static_cast<int>(kN);
inline constexpr int kTokensMax = 256;
inline constexpr int kLastCode = 255;

// Sums and differences of lanes that are kStride apart.
template <int kStride>
HWY_INLINE VF WithPartner(VF x) {
  alignas(64) static constexpr auto kLanes = [] {
    struct {
      int32_t from[kN];
      float sign[kN];
    } lanes{};
    for (int i = 0; i < kVector; ++i) {
      lanes.from[i] = i ^ kStride;
      lanes.sign[i] = (i & kStride) != 0 ? -0.0f : 0.0f;
    }
    return lanes;
  }();
  const VF partner = hn::TableLookupLanes(x, hn::SetTableIndices(DF(), kLanes.from));
  return hn::Add(partner, hn::Xor(x, hn::LoadU(DF(), kLanes.sign)));
}

// row [dim] times the orthonormal Hadamard matrix, in the order of RotateHadamard.
HWY_INLINE void Rotate(float* row, int dim) {
  const DF d;
  const VF size = hn::Set(d, static_cast<float>(1 / std::sqrt(static_cast<double>(dim))));
  for (int c = 0; c < dim; c += kVector) {
    VF x = WithPartner<1>(hn::LoadU(d, row + c));
    x = WithPartner<2>(x);
    if constexpr (kVector > 4) x = WithPartner<4>(x);
    if constexpr (kVector > 8) x = WithPartner<8>(x);
    hn::StoreU(x, d, row + c);
  }
  for (int stride = kVector; stride < dim; stride *= 2) {
    for (int c = 0; c < dim; c += kVector) {
      if ((c & stride) != 0) continue;
      const VF a = hn::LoadU(d, row + c), b = hn::LoadU(d, row + c + stride);
      hn::StoreU(hn::Add(a, b), d, row + c);
      hn::StoreU(hn::Sub(a, b), d, row + c + stride);
    }
  }
  for (int c = 0; c < dim; c += kVector)
    hn::StoreU(hn::Mul(hn::LoadU(d, row + c), size), d, row + c);
}

// The lower planes of a key or value, from its part of a row on.
HWY_INLINE void PackLower(const uint8_t* codes, const PlanesFormat& f, std::byte* to) {
  PackRow<2, 4>(codes, f.dim, 1, to);
  if (f.keep == 8) PackRow<4, 0>(codes, f.dim, 1, to + f.dim / 4);
}

template <typename T>
HWY_INLINE void PackKeys(const PackPlanesWork& w) {
  const PlanesFormat& f = w.format;
  const std::byte* rows[kTokensMax];
  for (int t = 0; t < f.tokens; ++t) rows[t] = w.keys.Row(w.begin + t);
  ChannelScales scales;
  for (int c = 0; c < f.dim; c += kBlockVectors * kVector) {
    ScaleBlock<T>(rows, f.tokens, c, kLastCode, w.upper, w.upper + f.key_step(), scales);
  }
  uint8_t codes[kHeadDimMax];
  for (int t = 0; t < f.tokens; ++t) {
    CodeRow<T>(rows[t], f.dim, scales, codes);
    PackRow<2, 6>(codes, f.dim, f.tokens, w.upper + f.key_codes() + 4 * t);
    PackLower(codes, f, w.lower + t * f.row_bytes());
  }
}

// Codes of one token's value, whose minimum and step go to the upper run.
template <typename T>
HWY_INLINE void CodeValue(const PackPlanesWork& w, int token, uint8_t* codes) {
  const DF d;
  const PlanesFormat& f = w.format;
  float row[kHeadDimMax];
  const std::byte* const from = w.values.Row(w.begin + token);
  for (int c = 0; c < f.dim; c += kVector) hn::StoreU(LoadKeys<T>(from, c), d, row + c);
  Rotate(row, f.dim);
  const VF limit = hn::Set(d, kQuantisedMax);
  VF low = limit, high = hn::Neg(limit);
  for (int c = 0; c < f.dim; c += kVector) {
    const VF x = hn::Min(hn::Max(hn::LoadU(d, row + c), hn::Neg(limit)), limit);
    hn::StoreU(x, d, row + c);
    low = hn::Min(low, x);
    high = hn::Max(high, x);
  }
  const HalfRange range = HalfRange::Of(hn::GetLane(hn::MinOfLanes(d, low)),
                                        hn::GetLane(hn::MaxOfLanes(d, high)), kLastCode);
  std::memcpy(w.upper + f.value_minimum() + 2 * token, &range.minimum, 2);
  std::memcpy(w.upper + f.value_step() + 2 * token, &range.step, 2);
  const hn::Rebind<uint8_t, DI> d8;
  const VF minimum = hn::Set(d, range.low), inverse = hn::Set(d, range.inverse);
  for (int c = 0; c < f.dim; c += kVector) {
    const VF above = hn::Sub(hn::LoadU(d, row + c), minimum);
    hn::StoreU(hn::DemoteTo(d8, hn::NearestInt(hn::Mul(above, inverse))), d8, codes + c);
  }
}

// Plane 0 of a strip: the word of each channel, eight channels at a time.
HWY_INLINE void PackStrip(const uint8_t (*codes)[kHeadDimMax], int dim, std::byte* to) {
  constexpr uint64_t mask = 0x0303030303030303ull;
  constexpr int kTokenOfByte[4] = {0, 2, 1, 3};
  for (int c = 0; c < dim; c += 8) {
    uint8_t bytes[4][8];
    for (int j = 0; j < 4; ++j) {
      uint64_t eight = 0;
      for (int m = 0; m < 4; ++m) {
        uint64_t own;
        std::memcpy(&own, codes[4 * m + kTokenOfByte[j]] + c, 8);
        eight |= (own >> 6 & mask) << (2 * m);
      }
      std::memcpy(bytes[j], &eight, 8);
    }
    uint8_t words[8][4];
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < 4; ++j) words[i][j] = bytes[j][i];
    }
    std::memcpy(to + int64_t{4} * c, words, sizeof words);
  }
}

template <typename T>
HWY_INLINE void PackValues(const PackPlanesWork& w) {
  const PlanesFormat& f = w.format;
  uint8_t codes[kStripTokens][kHeadDimMax];
  for (int first = 0; first < f.tokens; first += kStripTokens) {
    for (int i = 0; i < kStripTokens; ++i) {
      CodeValue<T>(w, first + i, codes[i]);
      PackLower(codes[i], f, w.lower + (first + i) * f.row_bytes() + f.row_bytes() / 2);
    }
    PackStrip(codes, f.dim, w.upper + f.value_codes() + int64_t{first} / 4 * f.dim);
  }
}

void PackPlanesItem(const PackPlanesWork& w) {
  KVS_CHECK(w.format.IsValid() && w.keys.dim == w.format.dim && w.values.dim == w.format.dim &&
            w.keys.dtype == w.values.dtype);
  WithElement(w.keys.dtype, [&]<typename T>() HWY_ATTR {
    PackKeys<T>(w);
    PackValues<T>(w);
  });
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(PackPlanesItem);

void PackPlanesSimd(const PackPlanesWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(PackPlanesItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
