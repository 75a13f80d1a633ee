// SPDX-License-Identifier: Apache-2.0
// Tables: what clients see. A version is immutable; entries beyond the counts are filled first,
// then the counts are stored. Everything else is a new version, published by one atomic store.
//
// Ownership: a table is the session's segment's, and its version the sequence's. Thread-safety: all
// methods under the store's lock. Cost: an entry a page; a system call for an arena that the
// session has not been granted yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "proto/shm_layout.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

class Tables {
 public:
  Tables(Books& books, SessionCatalog& catalog, PageReferences& references)
      : books_(books), catalog_(catalog), references_(references) {}

  // Room for a table of the sequence as it is, or with so many extents. RESOURCE_EXHAUSTED
  // TABLES_FULL. It is published, or released to the session's memory.
  Result<shm::SequenceTable*> ReserveTable(Session* session, const Sequence& s,
                                           uint32_t page_capacity) KVS_REQUIRES(store_lock);
  Result<shm::SequenceTable*> ReserveTable(Session* session, const Sequence& s,
                                           uint32_t page_capacity, size_t extents)
      KVS_REQUIRES(store_lock);
  // Never fails: what can fail was reserved.
  void Publish(Session* session, Sequence* s, shm::SequenceTable* table) KVS_REQUIRES(store_lock);
  // Adds what the sequence has beyond its table to it. REQUIRES: it has room.
  void PublishInPlace(Session* session, Sequence* s) KVS_REQUIRES(store_lock);
  void Unpublish(Session* session, Sequence* s) KVS_REQUIRES(store_lock);

 private:
  static shm::PageEntry EntryOf(const Sequence& s, const Page* page);
  static void WriteExtents(const Sequence& s, shm::ExtentEntry* entries);
  void RefreshView(Session* session, Sequence* s, size_t first_page) KVS_REQUIRES(store_lock);
  void GrantArena(Session* session, const Arena& arena) KVS_REQUIRES(store_lock);
  // Writes the pages from `first` on, each where its position says; grants their arenas.
  void WriteEntries(Session* session, const Sequence& s, std::span<Page* const> pages, size_t first,
                    shm::PageEntry* entries) KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  PageReferences& references_;
};

// Hands the session's sink a descriptor of the arena.
void PassArena(const PageMemory& memory, const Session& session, const Arena& arena)
    KVS_REQUIRES(store_lock);

}  // namespace kvstrata
