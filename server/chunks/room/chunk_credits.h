// SPDX-License-Identifier: Apache-2.0
// ChunkCredits: chunks that engines may write, from the credit to the moment when others find them:
// what WANT, CREDITS, STORED and RETURN of a chunk socket mean, and how a complete chunk gets its
// sum and is written below.
//
// A credit is one connection's, and nobody else is told its id before it comes back. What engines
// want is given in turn, at once as far as there is room, else when there is; of one engine at most
// a quarter of the region is credited at once. Credits age as chunks do: of an engine that has used
// none for longer than the chunk that gives way now, all but a few are recalled. A complete chunk
// is summed, then shown, then written to the tiers below: so many bytes at once, each chunk held
// meanwhile, and only if its bytes still have its sum. A key that the index has already keeps its
// older bytes.
//
// Thread-safety: none; the room's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "server/chunks/room/chunk_leases.h"
#include "server/chunks/room/room_state.h"

namespace kvstrata {

class ChunkCredits {
 public:
  ChunkCredits(RoomState* state, ChunkLeases* leases) : state_(state), leases_(leases) {}

  // OK, or why the packet is malformed.
  Status Want(ChunkClaims* claims, std::span<const std::byte> packet);
  Status Store(ChunkClaims* claims, std::span<const std::byte> packet);
  Status Return(ChunkClaims* claims, std::span<const std::byte> packet);
  void ReturnAll(ChunkClaims* claims);
  // Gives what is owed and there is room for: CREDITS go out, and RECALLs.
  void Give(const std::map<uint64_t, std::unique_ptr<ChunkClaims>>& all);

  // What came of the work that went out.
  void OnSummed(const ChunkRef& ref, const Checksum& sum);
  void OnVerified(const ChunkRef& ref, const Checksum& sum, uint8_t below);
  void OnWritten(const ChunkRef& ref, bool ok);
  // Nothing: it was not there, or did not come; OnLetGo follows. `below`: where it was.
  void OnRead(const ChunkRef& ref, const std::optional<Checksum>& sum, uint8_t below);
  void OnLetGo(const ChunkRef& ref);
  void OnProbed(const ChunkRef& ref, const ChunkKey& key, uint8_t below);
  // Whether complete chunks that tiers below are to get wait for their sum, or to be written.
  bool saves() const;
  // Those. Cost: a look at each.
  ChunkAmount Unwritten() const;
  // Chunks that were found again.
  void SaveReused();

 private:
  // To be written to these tiers.
  struct Saving {
    ChunkRef chunk;
    ChunkKey key;
    uint8_t below = kNowhere;
  };

  Chunk* TakeBack(ChunkClaims* claims, int32_t id);
  // Whether no more may be credited to its engine.
  bool AtMost(const ChunkClaims& claims) const;
  bool GiveOne(ChunkClaims* claims, std::vector<int32_t>* ids);
  void GiveInTurn(std::vector<ChunkClaims*> owed);
  void Recall(const std::map<uint64_t, std::unique_ptr<ChunkClaims>>& all);
  void NoteUse(ChunkClaims* claims);
  void Show(Chunk* chunk, const Checksum& sum);
  void Save(Chunk* chunk, uint8_t below);
  // Null: it has left memory, or nobody finds it any more.
  Chunk* Find(const Saving& saving) const;
  // Those whose sum is being made, if tiers below are to get them.
  ChunkAmount Unsummed() const;
  void SaveNext();
  void EndSaving(Chunk* chunk);

  RoomState* const state_;
  ChunkLeases* const leases_;
  std::deque<Saving> unsaved_;
  ChunkAmount writing_;       // now
  uint64_t last_served_ = 0;  // connection
  uint64_t recalled_to_ = 0;  // `pressed` of the last look
};

}  // namespace kvstrata
