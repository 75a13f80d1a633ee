// SPDX-License-Identifier: Apache-2.0
// SessionMemory: the two memfds of a session (proto/shm_layout.h), and what the daemon places in
// them: sequence slots, tables, slices of the access counters.
//
// Tables are PODs in memory that Boost.Interprocess manages (ADR 8): a managed external
// buffer over the table segment behind its header, without locks, because only the daemon writes
// that segment; clients map it read-only and know offsets alone.
//
// Ownership: unmaps both segments when destroyed. Thread-safety: the store's lock; what clients
// read or write is atomic. Cost: memory is touched when used; making one costs some ten system
// calls.
#pragma once

#include <boost/interprocess/indexes/null_index.hpp>
#include <boost/interprocess/managed_external_buffer.hpp>
#include <boost/interprocess/mem_algo/rbtree_best_fit.hpp>
#include <boost/interprocess/sync/mutex_family.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "proto/shm_layout.h"
#include "server/memory/extent_allocator.h"
#include "server/memory/memory_resource.h"
#include "server/store/reports/session_totals.h"

namespace kvstrata {

// A run of access counters; count 0: none.
struct AccessCounters {
  uint64_t first = 0;
  uint32_t count = 0;
};

class SessionMemory {
 public:
  static Result<std::unique_ptr<SessionMemory>> Create(uint64_t session, uint64_t daemon_epoch,
                                                       uint64_t global_epoch);
  ~SessionMemory();

  shm::SessionHeader* header() const {
    return reinterpret_cast<shm::SessionHeader*>(session_.base);
  }
  shm::TableHeader* tables() const { return reinterpret_cast<shm::TableHeader*>(table_.base); }
  int session_fd() const { return session_.fd.get(); }
  int table_fd() const { return table_.read_only_fd.get(); }
  uint64_t session_bytes() const { return session_.bytes; }
  uint64_t table_bytes() const { return table_.bytes; }

  // A free sequence slot; none when kMaxSequences are open.
  std::optional<uint32_t> TakeSlot();
  void FreeSlot(uint32_t slot);

  // A table of this capacity with zero counts; null when the segment is full.
  shm::SequenceTable* NewTable(uint32_t page_capacity, uint32_t index_capacity,
                               uint32_t extents = 0);
  void FreeTable(shm::SequenceTable* table);
  uint64_t OffsetOf(const shm::SequenceTable* table) const;
  // Whether the allocator's own structures hold together (audit).
  bool TablesSane() const { return buffer_->check_sanity(); }
  size_t live_tables() const { return live_tables_; }

  // Zeroed counters; count 0 when there are none left, which only loses statistics.
  AccessCounters NewCounters(uint32_t count);
  void FreeCounters(AccessCounters slice);
  uint32_t ReadCount(AccessCounters slice, uint32_t i) const;
  // Adds the counts of `from` to `to`. Counts that a client adds meanwhile may be lost.
  void CopyCounts(AccessCounters from, AccessCounters to);
  uint64_t counters_used() const { return access_counters_.used(); }
  static uint64_t CounterCost(AccessCounters slice);

 private:
  using Buffer = boost::interprocess::basic_managed_external_buffer<
      char, boost::interprocess::rbtree_best_fit<boost::interprocess::null_mutex_family>,
      boost::interprocess::null_index>;

  SessionMemory(MappedMemory session, MappedMemory table);
  uint32_t* Counter(uint64_t i) const;

  MappedMemory session_, table_;
  std::unique_ptr<Buffer> buffer_;
  ExtentAllocator access_counters_;
  std::vector<uint32_t> free_slots_;
  uint32_t next_slot_ = 0;
  size_t live_tables_ = 0;
  std::optional<CountedSession> counted_;
};

}  // namespace kvstrata
