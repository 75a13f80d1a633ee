// SPDX-License-Identifier: Apache-2.0
// ChunkLeases: who holds which chunks, and who waits for them: what ASK, RELEASE, HELD and ARRIVED
// of a chunk socket mean.
//
// A chunk that a lease holds is never evicted, moved or overwritten. All leases of one engine hold
// at most half of the region; what would be more is not there for it. A key that memory has not is
// looked up below; what is found there is read once, for all leases that want it.
//
// Thread-safety: none; the room's thread. Cost: a hash and two look-ups a key.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "server/chunks/room/room_state.h"

namespace kvstrata {

class ChunkLeases {
 public:
  explicit ChunkLeases(RoomState* state) : state_(state) {}

  // OK, or why the packet is malformed. HELD goes out.
  Status Ask(ChunkClaims* claims, std::span<const std::byte> packet);
  Status Release(ChunkClaims* claims, std::span<const std::byte> packet);
  void ReleaseAll(ChunkClaims* claims);
  // What the claims' leases wait for will not be held by them.
  void StopWaiting(ChunkClaims* claims);

  // The chunk has just been shown: those that wait for it hold it.
  void Arrive(Chunk* chunk);
  // Nothing comes under the key: those that wait are told so, and it leaves the index.
  void Miss(const ChunkKey& key);
  // ARRIVED of all that came since the last time.
  void SendArrived();

 private:
  struct Wanted {
    size_t at = 0;  // its key's place in the packet
    ChunkFind find;
  };
  struct Owner {
    ChunkClaims* claims = nullptr;
    uint32_t number = 0;
  };

  ChunkLease* LeaseOf(ChunkClaims* claims, uint32_t number);
  // What HELD says of a key that the index has; kNotThere with `*wanted`: nobody has looked below.
  int32_t Look(ChunkClaims* claims, ChunkLease* lease, const ChunkKey& key, uint32_t index,
               bool* wanted);
  int32_t Fetch(ChunkLease* lease, const ChunkFind& find, uint32_t index);
  void FetchAll(ChunkLease* lease, uint32_t first, std::span<const Wanted> wanted,
                std::span<int32_t> ids);
  int32_t Wait(ChunkLease* lease, RoomState::Entry* entry, uint32_t index);
  // Its id, or kNotThere: that would be more than the engine may hold.
  int32_t Hold(ChunkEngine* engine, ChunkLease* lease, Chunk* chunk, uint32_t index);
  void Unhold(ChunkEngine* engine, Chunk* chunk);
  void End(ChunkClaims* claims, ChunkLease* lease);
  void Tell(const ChunkWaiter& waiter, Chunk* chunk);

  RoomState* const state_;
  uint64_t leases_ = 0;                            // serial numbers given
  std::unordered_map<uint64_t, Owner> by_serial_;  // leases that may still be told what comes
  std::map<uint64_t, std::vector<chunks::ArrivedChunk>> arrived_;  // by serial number
};

}  // namespace kvstrata
