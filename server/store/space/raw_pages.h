// SPDX-License-Identifier: Apache-2.0
// RawPages: raw pages whose rows a codec holds. `keep_raw` says whether they go back, or to `host`,
// where they stay readable for other plans and later turns (ADR 5).
//
// Thread-safety: PlaceRaw without the store's lock, the rest under it. Cost: of copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"

namespace kvstrata {

class RawPages {
 public:
  RawPages(Books& books, SessionCatalog& catalog, Tables& tables, PageReferences& references,
           PageAllocator& allocator, PageCopies& copies)
      : books_(books),
        catalog_(catalog),
        tables_(tables),
        references_(references),
        allocator_(allocator),
        copies_(copies) {}

  // Released pages that are not on `host`: there they go, or back, as the plan says. Adds their
  // bytes. SEQUENCE_UNKNOWN, POOL_EXHAUSTED, TABLES_FULL, COPY_FAILED.
  Status PlaceRaw(uint64_t sequence, uint64_t* bytes) KVS_EXCLUDES(store_lock);
  // Publishes no table; returns the bytes.
  uint64_t GiveBack(Sequence* s, std::span<const size_t> positions) KVS_REQUIRES(store_lock);
  // Releases a page, and makes the prefix index forget it if nobody else holds it and no pin does.
  void DropRaw(Page* page) KVS_REQUIRES(store_lock);

 private:
  // Whether `n` released pages go back instead of to `host`.
  bool GivesBack(const Sequence& s, size_t n) const KVS_REQUIRES(store_lock);
  Status PlanPlacing(Sequence* s, CopyPlan* plan, uint64_t* bytes) KVS_REQUIRES(store_lock);
  // Somebody with the same prefix may have moved these pages already; whether there was one.
  bool UseHostCopies(Sequence* s, std::vector<size_t>* positions) KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  Tables& tables_;
  PageReferences& references_;
  PageAllocator& allocator_;
  PageCopies& copies_;
};

}  // namespace kvstrata
