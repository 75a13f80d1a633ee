// SPDX-License-Identifier: Apache-2.0
// How much room steps on a GPU keep for a sequence's packed extents, and for its blocks: generous
// where sequences grow, because each growth makes captured graphs stale.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/step/gpu/memory/step_memory.h"

namespace kvstrata {

// Packed extents of a sequence.
struct SegmentRoom {
  // The most that ops attend_packed and score_packed take.
  static constexpr int32_t kMost = 512;
  // Extents that an open segment has, now more, now fewer: 7 each of 1, 8, 64 and 512 flushes.
  static constexpr int32_t kMostPieces = 28;

  // What a sequence with so many extents, `final` of which stay, is given: flushes and joins
  // between final extents need no more.
  static int32_t For(int32_t final, int32_t extents) {
    return std::max(extents, std::min(final + kMostPieces, kMost));
  }
  // Room for `need`.
  static int32_t Grown(int32_t room, int32_t need) {
    constexpr int32_t kMultiple = 16;
    if (need <= room) return room;
    return std::min((need + 4 + kMultiple - 1) / kMultiple * kMultiple, kMost);
  }
};

// Blocks of a KV head in all of its extents, and those that are chosen. Both grow with a sequence,
// and therefore together.
struct BlockRoom {
  int32_t blocks = 0, list = 0;

  BlockRoom Grown(int32_t need_blocks, int32_t need_list) const {
    constexpr int32_t kMultiple = 64;
    if (need_blocks <= blocks && need_list <= list) return *this;
    return {std::max(blocks, Generous(need_blocks, kMultiple)),
            std::max(list, Generous(need_list + 1, kMultiple))};
  }
  bool operator==(const BlockRoom&) const = default;
};

}  // namespace kvstrata
