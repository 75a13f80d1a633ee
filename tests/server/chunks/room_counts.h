// SPDX-License-Identifier: Apache-2.0
// ChunkRoomTestPeer: proves what a ChunkRoom and its region count against what there is. Aborts
// where they differ. Thread-safety: as the room. Cost: a look at every chunk and lease.
#pragma once

#include "server/chunks/room/chunk_region.h"
#include "server/chunks/room/chunk_room.h"

namespace kvstrata {

struct ChunkRoomTestPeer {
  static void CheckCounts(const ChunkRegion& region);
  static void CheckCounts(const ChunkRoom& room);
};

}  // namespace kvstrata
