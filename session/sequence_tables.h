// SPDX-License-Identifier: Apache-2.0
// SequenceTables: from a sequence's published table to addresses, on either transport: enters an
// epoch, reads the table, has it grown where a step needs more, resolves what is new. TableMemory
// is what a transport does in its own way; its two kinds are LinkedMemory
// (client/linked/linked_session.h: arenas that the process mapped, the store behind a ring) and
// RemoteMemory (server/rpc/steps/remote_session.h: the daemon's own arenas and store).
// tests/e2e/transports_test.cc holds both to the same behaviour.
//
// Ownership: borrows the memory and the segments. Addresses are valid while the epoch of the Enter
// is entered; so is `table`. Threads: any, one at a time for a sequence, if the memory's functions
// may be called so. Cost: Enter resolves entries that are new since the last one; a Grow asks the
// store.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "base/status.h"
#include "session/session_sequence.h"

namespace kvstrata {

// What a call needs of a sequence's table.
struct TableClaim {
  SessionSequence* sequence = nullptr;
  int32_t tokens_after = 0;  // pages up to here, private from the committed tokens on
  bool write_index = true;   // index blocks of committed tokens, private where rows are missing
};

class TableMemory {
 public:
  virtual ~TableMemory() = default;
  // The address of the entry's `bytes` bytes, for whoever runs the steps: a CPU or a GPU.
  virtual Result<std::byte*> Resolve(const shm::PageEntry& entry, uint64_t bytes) = 0;
  // Whether steps may write the entry's bytes without asking for a private copy.
  virtual bool Writable(const shm::PageEntry& entry) = 0;
  // Has the store publish a table in which the claim holds. What Store::Grow fails with.
  virtual Status Grow(const TableClaim& claim) = 0;
  // Steps run on a GPU: pages of tier 0 are its own.
  virtual bool on_gpu() const = 0;
  // Copies bytes of tier 0 to the host; done when it returns.
  virtual Status Read(std::byte* to, const std::byte* from, uint64_t bytes) = 0;
};

class SequenceTables {
 public:
  SequenceTables(TableMemory* memory, const shm::TableReader& reader)
      : memory_(*memory), reader_(reader) {}

  // An entered epoch; leaves it when destroyed.
  class EnteredEpoch {
   public:
    EnteredEpoch(shm::TableReader* reader, int slot) : reader_(reader), slot_(slot) {}
    EnteredEpoch(EnteredEpoch&& other) noexcept
        : reader_(std::exchange(other.reader_, nullptr)), slot_(other.slot_) {}
    EnteredEpoch& operator=(EnteredEpoch&&) = delete;
    ~EnteredEpoch() {
      if (reader_ != nullptr) reader_->Leave(slot_);
    }
    // From now on the caller has to leave the slot.
    int Release() && {
      reader_ = nullptr;
      return slot_;
    }

   private:
    shm::TableReader* reader_;
    int slot_;
  };

  // Enters an epoch in which every claim holds. STEPS_OPEN (RESOURCE_EXHAUSTED), SEQUENCE_CLOSED
  // (NOT_FOUND: by its key), TABLE_INVALID (DATA_LOSS), or what the memory fails with. codes (may
  // be null) [claims]: a Code as int, of each claim that fails; others are left.
  Result<EnteredEpoch> Enter(std::span<const TableClaim> claims, int32_t* codes);
  void Leave(int slot) { reader_.Leave(slot); }

  // Reads the table as it is now and resolves what is new. REQUIRES: inside an epoch.
  Status Load(SessionSequence* s);

  // To how many tokens another session wants the sequence cut (Store::TruncateKey), no more than it
  // has; nothing: none does.
  std::optional<uint32_t> TruncateTo(const SessionSequence& s) const;
  // What an audit asks of the sequence's steps. REQUIRES: a table was loaded.
  shm::RecallRequest Recall(const SessionSequence& s) const { return reader_.Recall(s.slot); }

 private:
  Status LoadExtents(const shm::TableView& view, SessionSequence* s);
  Status LoadPages(SessionSequence* s);
  Status LoadBlocks(SessionSequence* s);
  bool Holds(const TableClaim& claim);

  TableMemory& memory_;
  shm::TableReader reader_;
};

}  // namespace kvstrata
