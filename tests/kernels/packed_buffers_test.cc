// How the buffers of codec packed on a GPU grow: each growth makes captured graphs stale.
#include "kernels/step/packed_buffers.h"

#include <gtest/gtest.h>

namespace kvstrata {
namespace {

// A sequence of blocks of 8, of which a sixteenth is chosen.
PackedBuffers::Capacity NeedOf(int32_t tokens) { return {1, 4, tokens / 8, tokens / 128}; }

TEST(PackedBuffers, RoomForAListLastsAsLongAsRoomForBlocks) {
  PackedBuffers::Capacity room;
  int growths = 0;
  for (int32_t tokens = 4096; tokens <= 1 << 20; tokens += tokens < 1 << 15 ? 4096 : 64) {
    const PackedBuffers::Capacity grown = room.Grown(NeedOf(tokens));
    if (grown == room) continue;
    EXPECT_NE(grown.blocks, room.blocks) << "only a list grew, at " << tokens;
    EXPECT_GE(grown.blocks, tokens / 8);
    EXPECT_GE(grown.list, tokens / 128);
    room = grown;
    ++growths;
  }
  EXPECT_LT(growths, 30);
}

TEST(PackedBuffers, SegmentsGrowUpToWhatTheOpsTake) {
  PackedBuffers::Capacity room;
  for (const int32_t segments : {1, 16, 17, 100, 511, 512}) {
    room = room.Grown({1, segments, 8, 1});
    EXPECT_GE(room.segments, segments);
    EXPECT_LE(room.segments, PackedBuffers::kSegmentsMax);
  }
}

// As many final extents as a prompt of 128K tokens has, and the pieces that decoding adds and
// joins.
TEST(PackedBuffers, PiecesMakeNoGraphStale) {
  constexpr int32_t kFinal = 12;
  PackedBuffers::Capacity need = {1, 0, 8, 1}, room;
  for (int32_t final = 0; final <= kFinal; ++final) {  // a prompt is packed while it comes
    need.segments = PackedBuffers::SegmentsFor(final, final);
    room = room.Grown(need);
  }
  for (int32_t pieces = 0; pieces <= PackedBuffers::kPiecesMax; ++pieces) {
    need.segments = PackedBuffers::SegmentsFor(kFinal, kFinal + pieces);
    EXPECT_EQ(room.Grown(need), room) << pieces << " pieces";
  }
  EXPECT_EQ(PackedBuffers::SegmentsFor(500, 505), PackedBuffers::kSegmentsMax);
  EXPECT_EQ(PackedBuffers::SegmentsFor(530, 530), 530) << "Begin refuses these";
}

}  // namespace
}  // namespace kvstrata
