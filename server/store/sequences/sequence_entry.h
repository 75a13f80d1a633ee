// SPDX-License-Identifier: Apache-2.0
// SequenceEntry: what a sequence that is opened or forked gets: references to what is held of its
// prompt, pages for the rest, a slot, a number and its first table.
//
// Ownership: the session's from Enter on. Thread-safety: all methods under the store's lock, in a
// long request of the session. Cost: of each page a constant; Take may evict.
#pragma once

#include <memory>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/prompts/opening.h"

namespace kvstrata {

// The lease that `s` has its place of (leases.h) counts again, unless it is over.
void GivePlaceBack(const SessionCatalog& catalog, Sequence* s) KVS_REQUIRES(store_lock);

class SequenceEntry {
 public:
  SequenceEntry(Books& books, const StoreOptions& options, SessionCatalog& catalog, Tables& tables,
                PageReferences& references, PageAllocator& allocator, RawPages& raw_pages);

  // Gives a sequence that is held without its raw pages the artefact at once, or what of it comes
  // first (Opening::upper).
  void OpenOnArtefact(Sequence* s, const Opening& o) KVS_REQUIRES(store_lock);
  // Fills `s`, which is nobody's yet, with the hit and with the new pages that the opening asks
  // for; what fails leaves it without any. POOL_EXHAUSTED.
  Status Take(Session* session, Sequence* s, Hit hit, const Opening& o) KVS_REQUIRES(store_lock);
  // Gives a sequence that has its pages a slot, a number and its first table. SEQUENCE_LIMIT,
  // TABLES_FULL.
  Result<OpenedSequence> Enter(Session* session, std::unique_ptr<Sequence> s)
      KVS_REQUIRES(store_lock);

 private:
  Books& books_;
  const StoreOptions& options_;
  SessionCatalog& catalog_;
  Tables& tables_;
  PageReferences& references_;
  PageAllocator& allocator_;
  RawPages& raw_pages_;
};

}  // namespace kvstrata
