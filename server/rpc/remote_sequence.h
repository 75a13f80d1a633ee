// RemoteSequence: a sequence whose steps the daemon runs for a remote session. SequenceTables turns
// its published table into addresses, growing it where a step needs more; the client library does
// the same for the linked road on its own mappings.
//
// Ownership: a remote session owns its sequences and its SequenceTables. Addresses are valid while
// the epoch of the Pin is entered; so is `table`. Threads: one at a time (the session's strand).
// Cost: Pin resolves entries that are new since the last one; a Grow is a call of the store.
#ifndef KVSTRATA_SERVER_RPC_REMOTE_SEQUENCE_H_
#define KVSTRATA_SERVER_RPC_REMOTE_SEQUENCE_H_

#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "proto/table_reader.h"
#include "server/rpc/step_runner.h"
#include "server/store/store.h"
#include "session/session_sequence.h"

namespace kvstrata {

struct RemoteSequence : SessionSequence {
  uint64_t step = 0;  // the open step that it is in; 0: none
  Status lost;        // a commit that the store refused: state and store differ since
};

// What a call needs of a sequence's table.
struct TableClaim {
  RemoteSequence* sequence = nullptr;
  int32_t tokens_after = 0;  // pages up to here, private from the committed tokens on
  bool write_index = true;   // index blocks of committed tokens, private where rows are missing
};

class SequenceTables {
 public:
  SequenceTables(Store* store, StepDevice* device, const SessionSegments& segments);

  // An entered epoch; leaves it when destroyed.
  class Pinned {
   public:
    Pinned(shm::TableReader* reader, int slot) : reader_(reader), slot_(slot) {}
    Pinned(Pinned&& other) noexcept
        : reader_(std::exchange(other.reader_, nullptr)), slot_(other.slot_) {}
    Pinned& operator=(Pinned&&) = delete;
    ~Pinned() {
      if (reader_ != nullptr) reader_->Leave(slot_);
    }

   private:
    shm::TableReader* reader_;
    int slot_;
  };

  // Enters an epoch in which every claim holds. STEPS_OPEN (RESOURCE_EXHAUSTED), or what Grow fails
  // with. codes (may be null) [claims]: per claim, a Code as int; written on failure only.
  Result<Pinned> Pin(std::span<const TableClaim> claims, std::vector<int32_t>* codes);

  // What Store::TruncateKey asks of the sequence.
  std::optional<uint32_t> TruncateTo(const RemoteSequence& s) const {
    return reader_.TruncateTo(s.slot, s.id);
  }

  // What an audit asks of the sequence's steps. REQUIRES: pinned.
  shm::RecallRequest Recall(const RemoteSequence& s) const { return reader_.Recall(s.slot); }

 private:
  Status Load(RemoteSequence* s);
  Status LoadExtents(RemoteSequence* s, const shm::TableView& view);
  Status LoadPage(RemoteSequence* s, const shm::PageEntry& entry);
  // tier: of the arena. What a GPU is to follow is reachable for it then.
  Result<std::byte*> Resolve(uint32_t arena, uint16_t tier, uint64_t offset);

  Store* const store_;
  StepDevice* const device_;
  const uint64_t session_;
  shm::TableReader reader_;
  uint32_t last_arena_ = 0;  // of the last Resolve
  std::byte* last_base_ = nullptr;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_REMOTE_SEQUENCE_H_
