// SPDX-License-Identifier: Apache-2.0
#include "tests/server/chunks/room_counts.h"

#include <map>
#include <vector>

#include "base/check.h"

namespace kvstrata {

void ChunkRoomTestPeer::CheckCounts(const ChunkRegion& region) {
  std::vector<ChunkRegion::Slab> counted(region.slabs_.size());
  for (const auto& [row_bytes, rows] : region.rows_) {
    size_t free = 0, idle = 0;
    for (const auto& [id, chunk] : rows.chunks) {
      const auto [from, to] = region.SlabsOf(row_bytes, id);
      KVS_CHECK(chunk.id == id && chunk.row_bytes == row_bytes && to <= region.slabs_.size());
      for (size_t i = from; i < to; ++i) {
        KVS_CHECK(region.slabs_[i].row_bytes == row_bytes);
        counted[i].busy += chunk.place == Chunk::Place::kBusy;
        counted[i].idle += chunk.place == Chunk::Place::kIdle;
      }
      free += chunk.place == Chunk::Place::kFree;
      idle += chunk.place == Chunk::Place::kIdle;
      KVS_CHECK(rows.free.contains(id) == (chunk.place == Chunk::Place::kFree));
      KVS_CHECK(rows.idle.contains({chunk.use, id}) == (chunk.place == Chunk::Place::kIdle));
    }
    KVS_CHECK(free == rows.free.size() && idle == rows.idle.size());
  }
  for (size_t i = 0; i < region.slabs_.size(); ++i) {
    KVS_CHECK(region.slabs_[i].busy == counted[i].busy && region.slabs_[i].idle == counted[i].idle);
  }
}

void ChunkRoomTestPeer::CheckCounts(const ChunkRoom& room) {
  CheckCounts(*room.state_.region);
  std::map<const ChunkEngine*, uint64_t> credited;
  const auto count = [&credited](const ChunkClaims& claims) {
    credited[claims.engine] += claims.credits.size() * claims.scope.row_bytes;
    uint64_t keys = 0;
    for (const auto& [number, lease] : claims.leases) keys += lease.held.size() + lease.waits;
    KVS_CHECK(keys == claims.keys);
  };
  for (const auto& [connection, claims] : room.claims_) count(*claims);
  for (const ChunkRoom::Resting& resting : room.resting_) count(*resting.claims);
  uint64_t credits = 0;
  for (const auto& [name, engine] : room.engines_) {
    KVS_CHECK(engine->credited_bytes == credited[engine.get()]);
    credits += engine->credited_bytes;
  }
  KVS_CHECK(credits == room.state_.by_state[static_cast<size_t>(ChunkState::kCredited)].bytes);
  for (const auto& [key, entry] : room.state_.index) {
    KVS_CHECK(entry.chunk == nullptr || entry.chunk->key == key);
  }
}

}  // namespace kvstrata
