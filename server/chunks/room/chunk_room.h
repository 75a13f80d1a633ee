// SPDX-License-Identifier: Apache-2.0
// ChunkRoom: the chunks of one user's engines (docs/chunks.md): who is there, what they hold, may
// write and wait for. Pure state: packets come in and go out as values, and so does the work that
// others do for it (sums, tiers); it has no socket, no thread and no clock.
//
//   ChunkRegion   memory, and which of it is free or may be evicted
//   ChunkLeases   who holds what: ASK, RELEASE
//   ChunkCredits  who may write what, and how it comes to be shown: WANT, STORED, RETURN
//   ChunkRoom     engines, their connections and processes
//
// An engine is all connections that say one name. What a scheduler has when its connection ends
// without DETACH rests until every process that the engine had by then is dead, or one of its
// schedulers says DETACH: until then somebody may still copy.
//
// Thread-safety: none; one thread. Errors: of Make CHUNKS_MEMORY, of Join CHUNK_ROW, of OnPacket
// CHUNK_PACKET, behind which the caller ends the connection. Cost of a packet: see the parts.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/chunks/room/chunk_credits.h"
#include "server/chunks/room/chunk_leases.h"
#include "server/chunks/room/chunk_work.h"
#include "server/chunks/room/room_state.h"

namespace kvstrata {

// Whoever has said a Hello that is well formed.
struct ChunkPeer {
  uint64_t connection = 0;  // its number; each has another
  uint32_t process = 0;
  chunks::Role role = chunks::Role::kScheduler;
  uint64_t row_bytes = 0;
  std::string engine;
};

// A chunk that whoever asks finds.
struct ShownChunk {
  ChunkKey key{};
  std::span<const std::byte> bytes;
  std::shared_ptr<void> keep;  // owns them
};

class ChunkRoom {
 public:
  static Result<std::unique_ptr<ChunkRoom>> Make(const ChunkRoomOptions& options);
  // OK, or why rows of that size cannot be had in a region of `region_bytes`.
  static Status CheckRow(uint64_t row_bytes, uint64_t region_bytes);

  uint32_t user() const { return state_.options.user; }
  uint64_t bytes() const { return state_.region->bytes(); }
  int fd() const { return state_.region->fd(); }
  // Somebody is connected, or may still copy.
  bool in_use() const { return !members_.empty() || !engines_.empty(); }
  // Whether complete chunks are on their way to the tiers below.
  bool saves() const { return credits_.saves(); }
  // Those. Cost: a look at each.
  ChunkAmount Unwritten() const { return credits_.Unwritten(); }
  // Whether something rests until that process is dead.
  bool Awaits(uint32_t process) const;

  Status Join(const ChunkPeer& peer);
  Status OnPacket(uint64_t connection, std::span<const std::byte> packet);
  // The connection is gone; once, also behind a malformed packet.
  void Leave(uint64_t connection);
  // REQUIRES: its connections have left.
  void OnDead(uint32_t process);

  // What came of work that went out; also of that of an earlier room.
  void OnDone(const ChunkDone& done);

  // Behind some of the above: gives credits that there is room for now, and what goes out.
  std::vector<ChunkPacket> TakePackets();
  std::vector<ChunkWork> TakeWork();

  // Those that are shown among the next `n` chunks from byte `*at` of the region on; then `*at` is
  // where the next list begins, behind the last one bytes() or more.
  std::vector<ShownChunk> List(uint64_t* at, size_t n) const;
  // Nothing: it is not shown. Its bytes are others' when it is shown no more.
  std::optional<ShownChunk> Shown(const ChunkKey& key) const;

  // All of it but `counters` and `capacity_bytes`.
  ChunkNumbers Numbers() const;

 private:
  friend struct ChunkRoomTestPeer;
  struct Member {
    ChunkPeer peer;
    ChunkEngine* engine = nullptr;
    bool detached = false;
  };
  // What a scheduler had that is gone.
  struct Resting {
    std::unique_ptr<ChunkClaims> claims;
    std::set<uint32_t> awaited;  // processes
  };

  explicit ChunkRoom(const ChunkRoomOptions& options) : credits_(&state_, &leases_) {
    state_.options = options;
  }

  ShownChunk ShownOf(const Chunk& chunk) const;
  ChunkEngine* EngineOf(const std::string& name);
  Status OnSpace(ChunkClaims* claims, std::span<const std::byte> packet);
  Status OnDetach(Member* member, std::span<const std::byte> packet);
  // All that they hold and may write.
  void Free(ChunkClaims* claims);
  void EndRests(ChunkEngine* engine);
  // What rests until that process is dead, of one engine or (null) of all, does so no longer.
  void StopAwaiting(uint32_t process, const ChunkEngine* engine);
  void EndIfGone(ChunkEngine* engine);

  RoomState state_;
  ChunkLeases leases_{&state_};
  ChunkCredits credits_;
  uint64_t engine_numbers_ = 0;
  std::map<std::string, std::unique_ptr<ChunkEngine>> engines_;  // by name
  std::map<uint64_t, Member> members_;                           // by connection
  std::map<uint64_t, std::unique_ptr<ChunkClaims>> claims_;  // claims of schedulers, by connection
  std::list<Resting> resting_;
};

}  // namespace kvstrata
