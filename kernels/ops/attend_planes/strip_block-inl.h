// SPDX-License-Identifier: Apache-2.0
// Some strips of a group that are attended together, the scales of their tokens, and plane 0 of
// their values. Included once per Highway target, by op attend_planes.
#if defined(KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_BLOCK_INL_H_
#undef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_BLOCK_INL_H_
#else
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_BLOCK_INL_H_
#endif

#include <limits>

#include "hwy/highway.h"
#include "kernels/ops/attend_planes/plane_words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

// Strips whose weights are rounded by one scale: their sums of products fit an int16.
inline constexpr int kBlockStrips = 4, kBlockTokens = kBlockStrips * kStripTokens;
static_assert(kBlockTokens * 3 * 255 / 2 <= std::numeric_limits<int16_t>::max());

// Plane 0 of the values of a strip, by tokens: byte c of row i has channel c of tokens i, i + 4, ..
// from bit 0 on.
class StripDigits {
 public:
  // One token's.
  struct Token {
    const uint8_t* row;
    int left;  // from its digit's place to that of plane 0
    int quarter;

    template <class D16>
    HWY_INLINE auto At(D16 d16, int at) const {
      const hn::Repartition<uint8_t, D16> d8;
      const uint8_t* const from = row + at;
      return [=, *this]<int kRun>() HWY_ATTR {
        const auto bytes = hn::BitCast(d16, hn::LoadU(d8, from + kRun * quarter));
        return hn::ShiftLeftSame(bytes, left);
      };
    }
  };

  // words [dim]: of the strip.
  HWY_INLINE void Read(const uint32_t* words, int dim) {
    dim_ = dim;
    const hn::Repartition<uint8_t, DU> d8;
    alignas(16) static constexpr uint8_t kByToken[16] = {0, 4, 8, 12, 2, 6, 10, 14,
                                                         1, 5, 9, 13, 3, 7, 11, 15};
    const auto by_token = hn::LoadDup128(d8, kByToken);
    for (int c = 0; c < dim; c += 4 * kVector) {
      alignas(64) uint32_t fours[4 * kN];  // four channels of each i
      for (int i = 0; i < 4 * kVector; i += kVector) {
        const VU flipped = hn::Xor(hn::LoadU(DU(), words + c + i), hn::Set(DU(), kFlipDigits));
        const auto turned = hn::TableLookupBytes(hn::BitCast(d8, flipped), by_token);
        hn::StoreU(hn::BitCast(DU(), turned), DU(), fours + i);
      }
      VU rows[4];
      hn::LoadInterleaved4(DU(), fours, rows[0], rows[1], rows[2], rows[3]);
      for (int i = 0; i < 4; ++i) hn::StoreU(hn::BitCast(d8, rows[i]), d8, bytes_ + i * dim + c);
    }
  }
  Token Of(int t) const { return {bytes_ + t % 4 * dim_, 6 - t / 4 * 2, dim_ / 4}; }

 private:
  int dim_ = 0;
  alignas(64) uint8_t bytes_[4 * kHeadDimMax];
};

// Some strips of a group, all of which are read.
struct StripBlock {
  const std::byte* upper;  // the group's
  const std::byte* lower;
  int count = 0;
  int first[kBlockStrips];      // token of the group that a strip begins with
  uint32_t fine[kBlockStrips];  // bit t: its token t is fine
};

// What weights of a block's tokens are multiplied by, for all heads.
struct StripScales {
  float step[kBlockTokens];
  float cell[kBlockTokens];  // kCell steps, or 0 where the token is fine
  float mean[kBlockTokens];  // what all channels get
  bool coarse = false;       // there is a token that is not fine

  void Read(const StripBlock& block, const PlanesFormat& f) {
    const VF fine_middle = hn::Set(DF(), MiddleCode(f)), middle = hn::Set(DF(), kMiddle);
    const VF cell_steps = hn::Set(DF(), kCell);
    coarse = false;
    for (int i = 0; i < block.count; ++i) {
      coarse = coarse || block.fine[i] + 1 != 1u << kStripTokens;
      for (int j = 0; j < kStripTokens; j += kVector) {
        const int t = block.first[i] + j, to = i * kStripTokens + j;
        const auto at = [&](int64_t scales) {
          return reinterpret_cast<const F16*>(block.upper + scales) + t;
        };
        const VF minimum = LoadFloats(at(f.value_minimum())), by = LoadFloats(at(f.value_step()));
        const auto fine = hn::RebindMask(DF(), BitMask(block.fine[i] >> j));
        hn::StoreU(by, DF(), step + to);
        hn::StoreU(hn::IfThenZeroElse(fine, hn::Mul(by, cell_steps)), DF(), cell + to);
        hn::StoreU(hn::MulAdd(by, hn::IfThenElse(fine, fine_middle, middle), minimum), DF(),
                   mean + to);
      }
    }
  }

 private:
  // Lane by lane, whether the bit is set.
  static HWY_INLINE hn::MFromD<DI> BitMask(uint32_t bits) {
    const VI bit = hn::Shl(hn::Set(DI(), 1), hn::Iota(DI(), 0));
    return hn::TestBit(hn::Set(DI(), static_cast<int32_t>(bits)), bit);
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_BLOCK_INL_H_
