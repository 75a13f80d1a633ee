// SPDX-License-Identifier: Apache-2.0
// Some strips of a group that are attended together, and the scales of their tokens. Included once
// per Highway target, by op attend_planes.
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
