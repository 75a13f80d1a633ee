// SPDX-License-Identifier: Apache-2.0
// Packed rows to fp32 rows, a few at a time, in a buffer that stays in the L1. Included once per
// Highway target.
//
// Two passes over some rows. The first copies values to the stage, with room for as many as there
// are channels, so that a damaged bitmap finds zeros there instead of leaving its row; and the
// mask, one bit a channel, where the bitmap is not one already. The second expands, to memory or
// (AVX3) to registers that the products use at once. Going through the stage costs stores, of which
// there is plenty; 16 rows lie between a store and the loads that straddle it, so that none waits
// for store forwarding. AVX3: one expand a 16 channels. Others: one byte shuffle a vector, from a
// table of 8-bit masks.
#if defined(KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ATTEND_PACKED_PACKED_ROWS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ATTEND_PACKED_PACKED_ROWS_INL_H_
#undef KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ATTEND_PACKED_PACKED_ROWS_INL_H_
#else
#define KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ATTEND_PACKED_PACKED_ROWS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"
#include "kernels/plans/mosaickv/ops/attend_packed/expand_table.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

inline constexpr int kStageRows = 16;     // rows that are decoded to memory at a time
inline constexpr int kStageRowsMax = 32;  // where they have up to kStageChannels channels together
#if HWY_TARGET == HWY_AVX3
inline constexpr int kStageChannels = 16 * kHeadDimMax;
#else
inline constexpr int kStageChannels = kStageRows * kHeadDimMax;
#endif
inline constexpr int kChannelUnit = 32;  // dense rows are padded to whole units

// Each of the low 64 / kNeighbours bits as kNeighbours equal bits.
template <int kNeighbours>
HWY_INLINE uint64_t SpreadBits(uint64_t bits) {
  if constexpr (kNeighbours == 2) {
    bits = (bits | bits << 16) & 0x0000FFFF0000FFFFull;
    bits = (bits | bits << 8) & 0x00FF00FF00FF00FFull;
    bits = (bits | bits << 4) & 0x0F0F0F0F0F0F0F0Full;
    bits = (bits | bits << 2) & 0x3333333333333333ull;
    bits = (bits | bits << 1) & 0x5555555555555555ull;
  } else if constexpr (kNeighbours == 4) {
    bits = (bits | bits << 24) & 0x000000FF000000FFull;
    bits = (bits | bits << 12) & 0x000F000F000F000Full;
    bits = (bits | bits << 6) & 0x0303030303030303ull;
    bits = (bits | bits << 3) & 0x1111111111111111ull;
  }
  return bits * ((1u << kNeighbours) - 1);
}

#if HWY_TARGET == HWY_AVX3
// Expands a staged row in registers, ascending.
struct StagedRow {
  const std::byte* mask;
  const float* values;

  // The next 32 channels.
  HWY_INLINE void NextPair(VF& a, VF& b) {
    uint32_t present;
    std::memcpy(&present, mask, sizeof present);
    const int first = std::popcount(present & 0xFFFFu);
    a = VF{_mm512_maskz_expandloadu_ps(static_cast<uint16_t>(present), values)};
    b = VF{_mm512_maskz_expandloadu_ps(static_cast<uint16_t>(present >> 16), values + first)};
    values += std::popcount(present);
    mask += sizeof present;
  }
};
#endif

class PackedDecoder {
 public:
#if HWY_TARGET == HWY_AVX3
  using Staged = float;
#else
  using Staged = uint16_t;
#endif

  HWY_INLINE explicit PackedDecoder(const PackedRows& rows)
      : rows_(rows),
        channels_((rows.bits * rows.neighbours + kChannelUnit - 1) / kChannelUnit * kChannelUnit) {
    const int stored = rows.bits * rows.neighbours;
    KVS_CHECK(rows.dim % 64 == 0 && rows.dim <= kHeadDimMax && stored <= rows.dim);
    KVS_CHECK(rows.neighbours == 1 || rows.neighbours == 2 || rows.neighbours == 4);
    KVS_CHECK(rows.keep <= stored && rows.value_offset * 8 >= (rows.bits + 127) / 128 * 128);
    KVS_CHECK(rows.value_offset + (2 * rows.keep + 15) / 16 * 16 <= rows.stride);
    whole_ = stored == channels_ && rows.neighbours == 1;
    for (int i = 0; i < kMaskWords; ++i) {
      const int left = std::clamp(stored - 64 * i, 0, 64);
      stored_[i] = left == 64 ? ~0ull : (1ull << left) - 1;
    }
  }

  // Channels of a dense row: a multiple of kChannelUnit, at most dim; those from there on are 0.
  HWY_INLINE int channels() const { return channels_; }

  // dense [count][channels()], 64-byte aligned.
  HWY_NOINLINE void Decode(const std::byte* const* rows, int count, float* dense) {
    for (int first = 0; first < count; first += kStageRows) {
      const int n = std::min(kStageRows, count - first);
      StageRows(rows + first, n);
      Expand(n, dense + first * channels_);
    }
  }

  // count * channels() <= kStageChannels, count <= kStageRowsMax. The rows must stay.
  HWY_INLINE void StageRows(const std::byte* const* rows, int count) {
    if (cleared_ < count) {
      std::fill(values_ + cleared_ * channels_, values_ + count * channels_, Staged{0});
      cleared_ = count;
    }
    switch (rows_.neighbours) {
      case 1:
        return Stage<1>(rows, count);
      case 2:
        return Stage<2>(rows, count);
      default:
        return Stage<4>(rows, count);
    }
  }

#if HWY_TARGET == HWY_AVX3
  // Row i of those staged, from channel c on, a multiple of 32.
  HWY_INLINE StagedRow At(int i, int c) const {
    StagedRow row = {mask_of_[i], values_ + i * channels_};
    for (; c > 0; c -= 32, row.mask += sizeof(uint32_t)) {
      uint32_t before;
      std::memcpy(&before, row.mask, sizeof before);
      row.values += std::popcount(before);
    }
    return row;
  }
#endif

 private:
  static constexpr int kMaskWords = kHeadDimMax / 64;

  template <int kNeighbours>
  HWY_INLINE void Stage(const std::byte* const* rows, int count) {
    const int keep = rows_.keep, offset = rows_.value_offset;
    Staged* to = values_;
    for (int i = 0; i < count; ++i, to += channels_) {
      mask_of_[i] = whole_ ? rows[i] : StageMask<kNeighbours>(rows[i], masks_[i]);
      StageValues(reinterpret_cast<const uint16_t*>(rows[i] + offset), keep, to);
    }
  }

  template <int kNeighbours>
  HWY_INLINE const std::byte* StageMask(const std::byte* row, uint64_t* mask) const {
    constexpr int kBytes = 8 / kNeighbours;  // bytes of the bitmap for a word of the mask
    const int words = (channels_ + 63) / 64;
    for (int w = 0; w < words; ++w) {
      uint64_t bits = 0;
      std::memcpy(&bits, row + w * kBytes, kBytes);
      mask[w] = SpreadBits<kNeighbours>(bits) & stored_[w];
    }
    return reinterpret_cast<const std::byte*>(mask);
  }

#if HWY_TARGET == HWY_AVX3
  static HWY_INLINE void StageValues(const uint16_t* from, int keep, Staged* to) {
    int j = 0;
    for (; j + 8 < keep; j += 16) {
      hn::Store(LoadFloats(reinterpret_cast<const BF16*>(from + j)), DF(), to + j);
    }
    if (j >= keep) return;
    const hn::CappedTag<float, 8> half;  // rows are padded to 16 bytes, not to 32
    const hn::Rebind<uint16_t, decltype(half)> half16;
    const auto bits =
        hn::PromoteTo(hn::RebindToUnsigned<decltype(half)>(), hn::LoadU(half16, from + j));
    hn::Store(hn::BitCast(half, hn::ShiftLeft<16>(bits)), half, to + j);
  }

  static HWY_INLINE const float* Expand16(uint16_t present, const float* values, float* dense) {
    _mm512_store_ps(dense, _mm512_maskz_expandloadu_ps(present, values));
    return values + std::popcount(uint32_t{present});
  }

  HWY_INLINE void Expand(int count, float* dense) const {
    const int channels = channels_;
    for (int i = 0; i < count; ++i) {
      const float* values = values_ + i * channels;
      const std::byte* mask = mask_of_[i];
      for (int c = 0; c < channels; c += kChannelUnit, mask += 4, dense += kChannelUnit) {
        uint16_t present[2];
        std::memcpy(present, mask, sizeof present);
        values = Expand16(present[0], values, dense);
        values = Expand16(present[1], values, dense + 16);
      }
    }
  }
#else
  static HWY_INLINE void StageValues(const uint16_t* from, int keep, Staged* to) {
    const hn::CappedTag<uint16_t, 8> d;
    for (int j = 0; j < keep; j += 8) hn::StoreU(hn::LoadU(d, from + j), d, to + j);
  }

  // At channel c at most c values are behind, so that the 8 loaded end within the row's stage.
  static HWY_INLINE const uint16_t* Expand8(uint8_t present, const uint16_t* values, float* dense) {
    const hn::Repartition<uint8_t, DF> d8;
    const auto next = hn::LoadDup128(d8, reinterpret_cast<const uint8_t*>(values));
#pragma GCC unroll 2
    for (int h = 0; h < 8; h += static_cast<int>(kN)) {
      const auto from = hn::Load(d8, kExpandTable.bytes[present] + 4 * h);
      hn::Store(hn::BitCast(DF(), hn::TableLookupBytesOr0(next, from)), DF(), dense + h);
    }
    return values + std::popcount(uint32_t{present});
  }

  HWY_INLINE void Expand(int count, float* dense) const {
    const int channels = channels_;
    for (int i = 0; i < count; ++i) {
      const uint16_t* values = values_ + i * channels;
      const auto* mask = reinterpret_cast<const uint8_t*>(mask_of_[i]);
      for (int c = 0; c < channels; c += kChannelUnit, dense += kChannelUnit) {
#pragma GCC unroll 4
        for (int b = 0; b < kChannelUnit; b += 8) values = Expand8(*mask++, values, dense + b);
      }
    }
  }
#endif

  const PackedRows rows_;
  const int channels_;
  bool whole_;                   // a row's bitmap is its mask
  uint64_t stored_[kMaskWords];  // channels that may be stored
  const std::byte* mask_of_[kStageRowsMax];
  uint64_t masks_[kStageRowsMax][kMaskWords];
  int cleared_ = 0;  // rows of values_ that are 0 behind their values
  alignas(64) Staged values_[kStageChannels];
};

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_PLANS_MOSAICKV_OPS_ATTEND_PACKED_PACKED_ROWS_INL_H_
