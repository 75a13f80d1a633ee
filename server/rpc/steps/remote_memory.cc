// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/steps/remote_memory.h"

#include <string>

namespace kvstrata {

// Ids of arenas are never used again, and one that a table of an entered epoch names is mapped.
// What lies there the store itself entered, so nothing is checked against the arena's size.
Result<std::byte*> RemoteMemory::Resolve(const shm::PageEntry& entry, uint64_t /*bytes*/) {
  if (entry.arena != last_arena_ || last_base_ == nullptr) {
    last_base_ = nullptr;  // until all of it is known
    if (StepGpu* const gpu = device_.gpu(); gpu != nullptr && entry.tier != 0) {
      KVS_RETURN_IF_ERROR(gpu->Reach(entry.arena));
    }
    last_base_ = store_.devices().ArenaBase(entry.arena);
    last_arena_ = entry.arena;
  }
  if (last_base_ == nullptr) {
    return Internal("TABLE_INVALID", "a published table names arena " +
                                         std::to_string(entry.arena) + ", which does not exist");
  }
  return last_base_ + entry.offset;
}

// The daemon may write every arena of its own.
bool RemoteMemory::Writable(const shm::PageEntry& entry) {
  return (entry.flags & (shm::kPageShared | shm::kPageSealed | shm::kPageAbsent)) == 0;
}

Status RemoteMemory::Grow(const TableClaim& claim) {
  const SequenceState& state = *claim.sequence->state;
  return store_.steps().Grow(
      session_, claim.sequence->id, static_cast<uint32_t>(claim.tokens_after),
      static_cast<uint32_t>(state.tokens()), static_cast<uint32_t>(state.indexed_tokens()));
}

}  // namespace kvstrata
