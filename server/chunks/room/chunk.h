// SPDX-License-Identifier: Apache-2.0
// Chunk: one row of a region, and what the room knows of it (docs/chunks.md).
//
// `place` and `use` are the region's (chunk_region.h), the rest is the room's (chunk_room.h).
// Thread-safety: the room's thread.
#ifndef KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_H_
#define KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "server/chunks/room/chunk_key.h"
#include "server/tier/checksum.h"

namespace kvstrata {

enum class ChunkState : uint8_t {
  kFree,
  kCredited,  // an engine may write it, and nobody else
  kSumming,   // complete; its sum is being made
  kReading,   // a tier below writes it
  kShown,     // in the index, for whoever asks
  kDropped,   // in the index no more, and leased still
};
inline constexpr size_t kChunkStates = 6;
inline constexpr std::string_view NameOf(ChunkState state) {
  constexpr std::string_view kNames[] = {"free",    "credited", "summing",
                                         "reading", "shown",    "dropped"};
  return kNames[static_cast<size_t>(state)];
}

// How many leases of one engine have it.
struct EngineHolds {
  uint64_t engine = 0;
  uint32_t leases = 0;
};

struct Chunk {
  enum class Place : uint8_t { kFree, kBusy, kIdle };

  Chunk(int32_t number, uint64_t bytes) : id(number), row_bytes(bytes) {}

  const int32_t id;  // it lies at byte id * row_bytes
  const uint64_t row_bytes;
  Place place = Place::kFree;
  ChunkState state = ChunkState::kFree;
  bool writing = false;      // below, now
  uint8_t asked_writes = 0;  // to which it was written, or is to be (BelowSet)
  uint64_t use = 0;          // the smaller, the sooner it is evicted
  ChunkKey key{};
  Checksum sum{};                    // since kShown
  std::vector<EngineHolds> engines;  // that hold it under leases
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_H_
