// SPDX-License-Identifier: Apache-2.0
// Chooses a rotated row's groups of largest L1 norm and writes its packed bytes. Included once per
// Highway target.
//
// Norms are compared by their bits, which order as the norms do and give NaNs a place. The choice
// is cut by bisection on them: most rows end after a few counts, at a value that exactly `keep`
// exceed.
#if defined(KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ROTATE_PACK_CHOOSE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ROTATE_PACK_CHOOSE_INL_H_
#undef KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ROTATE_PACK_CHOOSE_INL_H_
#else
#define KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ROTATE_PACK_CHOOSE_INL_H_
#endif

#include <bit>
#include <cstring>

#include "kernels/ops/simd_rows-inl.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

static_assert(std::endian::native == std::endian::little, "packed bytes are written by words");

using VI = hn::VFromD<DI>;

inline constexpr int kWords = kHeadDimMax / 64;

// Norms of a row as bits, zero-padded to whole vectors. Zeros at the end are never chosen: ties go
// to the lower group, and there are enough groups.
struct Norms {
  alignas(64) int32_t bits[kHeadDimMax];
  int padded = 0;
};

template <int kGroup>
HWY_INLINE VF NormsAt(const float* x) {
  const DF d;
  if constexpr (kGroup == 1) {
    return hn::Abs(hn::LoadU(d, x));
  } else if constexpr (kGroup == 2) {
    VF a, b;
    hn::LoadInterleaved2(d, x, a, b);
    return hn::Add(hn::Abs(a), hn::Abs(b));
  } else {
    VF a, b, c, e;
    hn::LoadInterleaved4(d, x, a, b, c, e);
    const VF two = hn::Add(hn::Abs(a), hn::Abs(b));
    return hn::Add(hn::Add(two, hn::Abs(c)), hn::Abs(e));
  }
}

template <int kGroup>
HWY_INLINE void TakeNorms(const float* x, int bits, Norms& norms) {
  const VI magnitude = hn::Set(DI(), 0x7FFFFFFF);
  int b = 0;
  for (; b < bits; b += kN) {
    hn::Store(hn::And(hn::BitCast(DI(), NormsAt<kGroup>(x + b * kGroup)), magnitude), DI(),
              norms.bits + b);
  }
  norms.padded = b;
  for (int i = bits; i < b; ++i) norms.bits[i] = 0;
}

// How many norms exceed `value`.
HWY_INLINE int CountAbove(const Norms& norms, int32_t value) {
  const DI d;
  const VI limit = hn::Set(d, value);
#if HWY_TARGET == HWY_AVX3
  size_t count = 0;
  for (int b = 0; b < norms.padded; b += kN) {
    count += hn::CountTrue(d, hn::Gt(hn::Load(d, norms.bits + b), limit));
  }
  return static_cast<int>(count);
#else
  VI count = hn::Zero(d);
  for (int b = 0; b < norms.padded; b += kN) {
    count = hn::Sub(count, hn::VecFromMask(d, hn::Gt(hn::Load(d, norms.bits + b), limit)));
  }
  return hn::GetLane(hn::SumOfLanes(d, count));
#endif
}

// Fewer than `keep` norms exceed `at`, or exactly so many.
struct Cut {
  int32_t at;
  bool exact;
};

// Starts at `guess` with growing steps, since neighbouring rows are cut at similar values.
HWY_INLINE Cut FindCut(const Norms& norms, int keep, int32_t guess) {
  constexpr int64_t kTop = 0x7FFFFFFF;  // nothing exceeds it
  int64_t low = -1, high = kTop;        // more than `keep` exceed low, fewer exceed high
  int64_t probe = guess, step = 1 << 20;
  while (high - low > 1) {
    const int above = CountAbove(norms, static_cast<int32_t>(probe));
    if (above == keep) return {static_cast<int32_t>(probe), true};
    (above > keep ? low : high) = probe;
    probe += above > keep ? step : -step;
    step *= 2;
    const bool between = low >= 0 && high < kTop;
    if (between || probe <= low || probe >= high) probe = low + (high - low) / 2;
  }
  return {static_cast<int32_t>(high), false};
}

struct Chosen {
  uint64_t words[kWords] = {};
};

template <typename M>
HWY_INLINE void SetBits(M mask, int b, Chosen& chosen) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(DI(), mask, bytes);
  const uint64_t bits = bytes[0] | static_cast<uint64_t>(bytes[1]) << 8;
  chosen.words[b / 64] |= bits << (b % 64);
}

// The lowest `count` of the groups whose norm is `at` as well.
inline HWY_NOINLINE void AddTies(const Norms& norms, int32_t at, int count, Chosen& chosen) {
  for (int b = 0; b < norms.padded && count > 0; ++b) {
    if (norms.bits[b] != at) continue;
    chosen.words[b / 64] |= uint64_t{1} << (b % 64);
    --count;
  }
}

HWY_INLINE Chosen Choose(const Norms& norms, int keep, int32_t& guess) {
  const DI d;
  const Cut cut = FindCut(norms, keep, guess);
  guess = cut.at;
  Chosen chosen;
  const VI limit = hn::Set(d, cut.at);
  for (int b = 0; b < norms.padded; b += kN) {
    SetBits(hn::Gt(hn::Load(d, norms.bits + b), limit), b, chosen);
  }
  if (cut.exact) return chosen;
  int above = 0;
  for (uint64_t word : chosen.words) above += std::popcount(word);
  AddTies(norms, cut.at, keep - above, chosen);
  return chosen;
}

// The values of the chosen channels, ascending, one channel a group.
HWY_INLINE void TakeSingles(const float* x, int bits, const Chosen& chosen, float* kept) {
  for (int b = 0; b < bits; b += kN) {
    const uint64_t part = chosen.words[b / 64] >> (b % 64);
    const uint8_t bytes[8] = {static_cast<uint8_t>(part), static_cast<uint8_t>(part >> 8)};
    const VF row = hn::LoadU(DF(), x + b);
    kept += hn::CompressStore(row, hn::LoadMaskBits(DF(), bytes), DF(), kept);
  }
}

template <int kGroup>
HWY_INLINE void TakeGroups(const float* x, const Chosen& chosen, float* kept) {
  for (int i = 0; i < kWords; ++i) {
    for (uint64_t word = chosen.words[i]; word != 0; word &= word - 1) {
      const int b = i * 64 + std::countr_zero(word);
      std::memcpy(kept, x + b * kGroup, kGroup * sizeof(float));
      kept += kGroup;
    }
  }
}

// As FromFloat<BF16>.
HWY_INLINE void WriteValues(const float* kept, int keep, std::byte* out) {
  const DU d;
  const hn::Rebind<uint16_t, DU> d16;
  uint16_t values[kHeadDimMax + kN];
  for (int i = 0; i < keep; i += kN) {
    const VF x = hn::LoadU(DF(), kept + i);
    const auto bits = hn::BitCast(d, x);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7FFFu))));
    const auto nan = hn::RebindMask(d, hn::IsNaN(x));
    const auto result = hn::IfThenElse(nan, hn::Set(d, 0x7FC0u), rounded);
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(DI(), result)), d16, values + i);
  }
  std::memcpy(out, values, static_cast<size_t>(keep) * 2);
}

template <int kGroup>
HWY_INLINE void PackGroups(const float* x, const PackedRows& f, int32_t& guess, float* kept,
                           std::byte* out) {
  Norms norms;
  TakeNorms<kGroup>(x, f.bits, norms);
  const Chosen chosen = Choose(norms, f.keep / kGroup, guess);
  if constexpr (kGroup == 1) {
    TakeSingles(x, f.bits, chosen, kept);
  } else {
    TakeGroups<kGroup>(x, chosen, kept);
  }
  for (int i = 0; i < 2; ++i) hn::StoreU(hn::Zero(DF()), DF(), kept + f.keep + i * kN);
  std::memset(out, 0, static_cast<size_t>(f.stride));
  std::memcpy(out, chosen.words, static_cast<size_t>(f.bits + 7) / 8);
  WriteValues(kept, f.keep, out + f.value_offset);
}

// x [dim] is a rotated row; kept [keep and 2N zeros] receives what was kept, before rounding.
inline HWY_NOINLINE void PackRow(const float* x, const PackedRows& f, int32_t& guess, float* kept,
                                 std::byte* out) {
  switch (f.neighbours) {
    case 1:
      return PackGroups<1>(x, f, guess, kept, out);
    case 2:
      return PackGroups<2>(x, f, guess, kept, out);
    default:
      return PackGroups<4>(x, f, guess, kept, out);
  }
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ROTATE_PACK_CHOOSE_INL_H_
