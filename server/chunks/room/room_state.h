// SPDX-License-Identifier: Apache-2.0
// RoomState: what the parts of a ChunkRoom share: the region, the index of its chunks by key, who
// waits for them, what is counted, and what goes out.
//
// Thread-safety: none; the room's thread. For the files of the room alone.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "server/chunks/room/chunk.h"
#include "server/chunks/room/chunk_packets.h"
#include "server/chunks/room/chunk_region.h"
#include "server/chunks/room/chunk_work.h"
#include "server/chunks/room/engine_recalls.h"

namespace kvstrata {

struct ChunkRoomOptions {
  uint64_t serial = 1;  // number of the room within the process
  uint32_t user = 0;
  uint64_t bytes = 0;                           // size of its region
  uint32_t layout_percent = 100;                // part of them that rows of one size may have
  uint8_t write_shown = kNowhere;               // the tiers that get a chunk when it is shown
  uint8_t write_reused = kNowhere;              // and those that get it when it is found again
  uint64_t writing_bytes = uint64_t{64} << 20;  // below, at once
  // Sets `there` and `maybe`; answers at once. Null: nothing is below.
  std::function<void(std::span<ChunkFind>)> find;
  ChunkCounters* counters = nullptr;  // outlives the room
  EngineRecalls* recalls = nullptr;   // the same
};

// All connections of one user that say the same name.
struct ChunkEngine {
  uint64_t number = 0;
  std::string name;
  uint64_t pinned_bytes = 0;  // bytes of chunks that its leases have
  uint64_t credited_bytes = 0;
  uint32_t connections = 0;
  std::set<uint32_t> processes;  // that live and may map the region
};

struct ChunkLease {
  uint64_t serial = 0;
  uint32_t number = 0;  // the client's
  uint64_t use = 0;     // use of its first key
  std::vector<Chunk*> held;
  uint32_t waits = 0;  // keys of it that are coming
};

// What one scheduler's connection has of the room, also when it is gone and its engine is not.
struct ChunkClaims {
  uint64_t connection = 0;
  ChunkEngine* engine = nullptr;
  ChunkScope scope;
  bool has_space = false;
  std::map<uint32_t, ChunkLease> leases;  // that hold something or wait for it, by number
  uint64_t keys = 0;                      // keys of them all
  std::unordered_set<int32_t> credits;
  uint64_t owed = 0;
  uint64_t used = 0;      // when it wanted or stored last
  bool recalled = false;  // since then it was asked for what it does not use
  bool empty() const { return leases.empty() && credits.empty(); }
};

struct ChunkWaiter {
  uint64_t lease = 0;  // its serial number
  uint32_t index = 0;
};

struct RoomState {
  struct Entry {
    Chunk* chunk = nullptr;  // null: a tier is asked for it
    std::vector<ChunkWaiter> waiters;
  };

  ChunkRoomOptions options;
  std::unique_ptr<ChunkRegion> region;
  std::unordered_map<ChunkKey, Entry, ChunkKeyHash> index;
  std::array<ChunkAmount, kChunkStates> by_state{};
  ChunkAmount leased;
  uint64_t probes = 0;   // under way
  uint64_t starved = 0;  // connections that are owed credits, and there was no room
  uint64_t pressed = 0;  // the newest use that has to give way
  std::vector<ChunkPacket> packets;
  std::vector<ChunkWork> work;
  std::vector<Chunk*> reused;  // and may have to be written below; held

  void SetState(Chunk* chunk, ChunkState to);
  // A credited or reading chunk; null: there is no room. What is evicted leaves the index.
  Chunk* Take(uint64_t row_bytes, ChunkState state);
  void Free(Chunk* chunk);
  // Behind the last use of a shown or dropped chunk: it may be evicted, or is free.
  void Settle(Chunk* chunk);
  // Out of the index, and free when no lease has it.
  void Drop(Chunk* chunk);
  // The time of a use that begins now; the smaller `index`, the later it is evicted.
  uint64_t NextUse() { return uint64_t{++uses_} << kUseBits; }
  static uint64_t UseOf(uint64_t first, uint64_t index);
  void Order(ChunkWork::Kind kind, Chunk* chunk, uint8_t below = kNowhere);
  Chunk* Find(const ChunkRef& ref);

 private:
  static constexpr int kUseBits = 20;
  uint64_t uses_ = 0;
};

}  // namespace kvstrata
