// SPDX-License-Identifier: Apache-2.0
// How the room for packed rows on a GPU grows: each growth makes captured graphs stale.
#include "kernels/plans/mosaickv/gpu/packed_room.h"

#include <gtest/gtest.h>

namespace kvstrata {
namespace {

// A sequence of blocks of 8, of which a sixteenth is chosen.
TEST(BlockRoom, LastsForAListAsLongAsForBlocks) {
  BlockRoom room;
  int growths = 0;
  for (int32_t tokens = 4096; tokens <= 1 << 20; tokens += tokens < 1 << 15 ? 4096 : 64) {
    const BlockRoom grown = room.Grown(tokens / 8, tokens / 128);
    if (grown == room) continue;
    EXPECT_NE(grown.blocks, room.blocks) << "only a list grew, at " << tokens;
    EXPECT_GE(grown.blocks, tokens / 8);
    EXPECT_GE(grown.list, tokens / 128);
    room = grown;
    ++growths;
  }
  EXPECT_LT(growths, 30);
}

TEST(SegmentRoom, GrowsUpToWhatTheOpsTake) {
  int32_t room = 0;
  for (const int32_t segments : {1, 16, 17, 100, 511, 512}) {
    room = SegmentRoom::Grown(room, segments);
    EXPECT_GE(room, segments);
    EXPECT_LE(room, SegmentRoom::kMost);
  }
}

// As many final extents as a prompt of 128K tokens has, and the pieces that decoding adds and
// joins.
TEST(SegmentRoom, PiecesMakeNoGraphStale) {
  constexpr int32_t kFinal = 12;
  int32_t room = 0;
  for (int32_t final = 0; final <= kFinal; ++final) {  // a prompt is packed while it comes
    room = SegmentRoom::Grown(room, SegmentRoom::For(final, final));
  }
  for (int32_t pieces = 0; pieces <= SegmentRoom::kMostPieces; ++pieces) {
    const int32_t need = SegmentRoom::For(kFinal, kFinal + pieces);
    EXPECT_EQ(SegmentRoom::Grown(room, need), room) << pieces << " pieces";
  }
  EXPECT_EQ(SegmentRoom::For(500, 505), SegmentRoom::kMost);
  EXPECT_EQ(SegmentRoom::For(530, 530), 530) << "Begin refuses these";
}

}  // namespace
}  // namespace kvstrata
