// SPDX-License-Identifier: Apache-2.0
// Chunk: one row of a region, and what the room knows of it (docs/chunks.md).
//
// `place` and `use` are the region's (chunk_region.h), the rest is the room's (chunk_room.h).
// Thread-safety: the room's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/checksum.h"
#include "proto/chunk_messages.h"

namespace kvstrata {

// The key of a chunk: what of a user's chunk makes its bytes, in 32 bytes. The room's index and the
// tiers below go by it. Pure functions; any thread. Cost: two blocks of SHA-256.
using ChunkKey = std::array<uint8_t, 32>;

// The key is a hash already.
struct ChunkKeyHash {
  size_t operator()(const ChunkKey& key) const {
    size_t first;
    std::memcpy(&first, key.data(), sizeof(first));
    return first;
  }
};

// What all keys of one connection share.
struct ChunkScope {
  uint32_t user = 0;
  chunks::Hash space{};
  uint64_t row_bytes = 0;
};

// SHA-256 over "kvstrata chunk 1", user (u32), space, hash, group (u32), row_bytes (u64), all
// little-endian.
ChunkKey ChunkKeyOf(const ChunkScope& scope, const chunks::AskedKey& asked);

// Its key in tiers.
std::string TierKeyOf(const ChunkKey& key);
// And back; nothing: it is no chunk's.
std::optional<ChunkKey> ChunkKeyFrom(std::string_view tier_key);

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

// What is counted of chunks, for metrics, the status page and `kvstrata tier ls`. Values.
struct ChunkAmount {
  uint64_t chunks = 0, bytes = 0;
};

// Since the daemon's start.
struct ChunkCounters {
  uint64_t asked = 0;  // keys; each is a hit, a miss or coming
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t coming = 0;
  uint64_t arrived = 0;  // keys that were coming, and came
  uint64_t stored = 0, stored_bytes = 0;
  uint64_t duplicates = 0;  // stored, and there already
  uint64_t evicted = 0;
  uint64_t changed = 0;  // their bytes were other than their sum when they were to be written
  uint64_t unsaved = 0;  // evicted before they could be written below
  uint64_t written = 0, written_bytes = 0, write_failures = 0;  // below
  uint64_t read = 0, read_bytes = 0, read_failures = 0;         // from below
};

struct ChunkNumbers {
  uint64_t capacity_bytes = 0;                         // chunks.bytes
  uint64_t region_bytes = 0;                           // 0: no engine has come yet
  uint32_t user = 0;                                   // whose region it is
  uint64_t connections = 0, engines = 0, resting = 0;  // now; of ended schedulers
  std::array<ChunkAmount, kChunkStates> by_state{};    // now, by ChunkState; of kFree 0
  ChunkAmount leased;                                  // now
  uint64_t starved = 0;  // connections that get no credits now, because all room is in use
  ChunkCounters counters;

  const ChunkAmount& of(ChunkState state) const { return by_state[static_cast<size_t>(state)]; }
  uint64_t used_bytes() const {
    uint64_t bytes = 0;
    for (const ChunkAmount& amount : by_state) bytes += amount.bytes;
    return bytes;
  }
};

}  // namespace kvstrata
