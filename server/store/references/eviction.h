// SPDX-License-Identifier: Apache-2.0
// Eviction: what goes when memory is short, or an operator says so: cached pages and artefacts that
// nobody uses and no pin keeps. The one released longest ago goes first (PrefixIndex::oldest); one
// that selectors chose lately is spared, once for each time (sequences/selected_pages.cc), unless a
// whole arena is emptied.
//
// Thread-safety: Evict from any thread, the rest under the store's lock. Cost: of one page a
// look-up; of finding those whose space somebody can use, a look at all cached pages of a pool.
#pragma once

#include <cstdint>
#include <set>

#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

class Eviction {
 public:
  Eviction(Books& books, SessionCatalog& catalog, PageReferences& references)
      : books_(books), catalog_(catalog), references_(references) {}

  // Drops cached pages and artefacts that no sequence uses and no pin keeps; with `dry_run` only
  // counts them.
  EvictResult Evict(bool dry_run) KVS_EXCLUDES(store_lock);

  // Evicts pages whose space the taker can use, of any tenant, or of its own only; whether that
  // gave any.
  bool EvictFor(const Taker& taker, PoolId pool, uint64_t bytes, bool only_own)
      KVS_REQUIRES(store_lock);
  void EvictPage(Page* page) KVS_REQUIRES(store_lock);
  // Drops the oldest artefact of any tenant, or of one, that nobody uses and that has bytes in
  // `pool`.
  bool EvictArtefact(PoolId pool, const Tenant* tenant = nullptr) KVS_REQUIRES(store_lock);
  // Pinned pages stay.
  void DropUnusedPagesOf(const Model& model) KVS_REQUIRES(store_lock);
  // Extents that artefacts alone refer to, and no pin keeps, once each.
  std::set<const Page*> UnusedExtents() const KVS_REQUIRES(store_lock);

 private:
  // Nobody uses it, and no pin keeps it.
  bool MayGo(const Artefact& artefact) const KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  PageReferences& references_;
};

}  // namespace kvstrata
