// SPDX-License-Identifier: Apache-2.0
// The segments of a session as the store would publish them, in this process's memory, with room
// for one table; and a sequence of it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <vector>

#include "session/session_sequence.h"

namespace kvstrata::test {

inline constexpr Geometry kSmall{.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64};
inline constexpr uint32_t kCapacity = 256;  // pages of a table, index blocks too

class PublishedTables {
 public:
  PublishedTables()
      : session_(Zeroed(sizeof(shm::SessionHeader) + kAccessCounters * sizeof(uint32_t))),
        tables_(Zeroed(kBytes)) {
    header()->access_counters_offset = sizeof(shm::SessionHeader);
    tables()->global_epoch = 1;
  }

  shm::SessionHeader* header() { return reinterpret_cast<shm::SessionHeader*>(session_.get()); }
  shm::TableHeader* tables() { return reinterpret_cast<shm::TableHeader*>(tables_.get()); }
  shm::TableReader reader() { return {header(), tables(), kBytes}; }
  // The table of slot `i`.
  shm::SequenceTable* table(uint32_t i) {
    return reinterpret_cast<shm::SequenceTable*>(tables_.get() + sizeof(shm::TableHeader) +
                                                 i * kTableBytes);
  }
  uint32_t* access_counters() {
    return reinterpret_cast<uint32_t*>(session_.get() + header()->access_counters_offset);
  }
  // Steps that are inside an epoch.
  int readers() {
    int n = 0;
    for (const shm::ReaderSlot& slot : header()->readers) n += slot.epoch != 0 ? 1 : 0;
    return n;
  }

  // Publishes a table of `pages` private pages, each at its number's offset, in slot `i`.
  void Publish(uint32_t i, uint64_t sequence, uint32_t pages) {
    shm::SequenceTable* const t = table(i);
    ++t->version;
    t->sequence_id = sequence;
    t->page_capacity = t->index_capacity = kCapacity;
    for (uint32_t p = 0; p < pages; ++p) shm::Entries(t)[p] = {1, 0, 0, p};
    t->pages = pages;
    tables()->slots[i].sequence_id = sequence;
    tables()->slots[i].table_offset =
        static_cast<uint64_t>(reinterpret_cast<std::byte*>(t) - tables_.get());
  }
  // As the store does when another session closes the sequence by its key.
  void Close(uint32_t i) { tables()->slots[i].table_offset = 0; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<std::byte, Free>;

  static constexpr uint64_t kAccessCounters = 4096, kTables = 4;
  static constexpr uint64_t kTableBytes =
      sizeof(shm::SequenceTable) + 2 * kCapacity * sizeof(shm::PageEntry);
  static constexpr uint64_t kBytes = sizeof(shm::TableHeader) + kTables * kTableBytes;

  static Memory Zeroed(uint64_t bytes) {
    const uint64_t pages = (bytes + 4095) / 4096 * 4096;
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(4096, pages));
    std::fill_n(memory, pages, std::byte{});
    return Memory(memory);
  }

  Memory session_, tables_;
};

// A sequence with id and slot that holds `tokens` tokens.
inline std::unique_ptr<SessionSequence> SequenceOf(uint32_t slot, uint64_t id, uint32_t tokens,
                                                   const std::string& plan = "full") {
  auto s = std::make_unique<SessionSequence>();
  s->id = id;
  s->slot = slot;
  s->model = 1;
  s->boundary_tokens = Ascending({});
  const std::vector<int32_t> ids(tokens, 7);
  BeginState(kSmall, ParsePlan(plan).value(), ids, {tokens, 0, 0, {}}, s.get());
  return s;
}

}  // namespace kvstrata::test
