// SPDX-License-Identifier: Apache-2.0
// PageReferences: the life of a page by its references (docs/design.md, "The life of a page"): the
// last one leaves it cached, if the prefix index has it, or retired until every reader that may see
// it has left its epoch. What lies on a lost device is forgotten here, too.
//
// Ownership: of retired pages, the tenants'. Thread-safety: methods that say so are called under
// the store's lock, Reclaim from any thread. Cost: Ref and Release are constant; reclaiming looks
// at all readers of a tenant.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"

namespace kvstrata {

class PageReferences {
 public:
  PageReferences(Books& books, SessionCatalog& catalog) : books_(books), catalog_(catalog) {}

  void RefPage(Page* page) KVS_REQUIRES(store_lock);
  // Adds the pages to `to`, with a reference each.
  void RefAll(Session* session, std::span<Page* const> from, std::vector<Page*>* to)
      KVS_REQUIRES(store_lock);
  void Release(Page* page) KVS_REQUIRES(store_lock);
  // From the last to the first, so that of a prefix the end is evicted before its beginning. Null
  // is no page.
  void ReleaseAll(Session* session, std::vector<Page*>* pages) KVS_REQUIRES(store_lock);
  void ReleaseExtents(std::vector<Extent>* extents) KVS_REQUIRES(store_lock);
  // Gives up the references of one that the books have no more, and frees what that leaves.
  void ReleaseArtefact(Artefact artefact) KVS_REQUIRES(store_lock);
  // REQUIRES: nothing refers to it.
  void Retire(Page* page) KVS_REQUIRES(store_lock);
  // Its bytes stay where they are until as many EndKeep; a page that every reader has passed
  // meanwhile is parked, and the last EndKeep frees it.
  void Keep(Page* page) KVS_REQUIRES(store_lock);
  void EndKeep(Page* page) KVS_REQUIRES(store_lock);
  const std::set<Page*>& parked() const KVS_REQUIRES(store_lock) { return parked_; }
  // For pages that no table has named, or that all readers have passed.
  void FreePages(std::span<Page* const> pages) KVS_REQUIRES(store_lock);
  // Makes the prefix index and the artefacts forget what lies on a device that is lost, once.
  void DropLost() KVS_REQUIRES(store_lock);

  // What was retired before is free once the readers of now have left. Only after the tables that
  // named it are unpublished.
  void Advance(Tenant* tenant) KVS_REQUIRES(store_lock);
  // Frees what every reader has passed; called by the daemon's housekeeping and by allocation.
  void Reclaim() KVS_EXCLUDES(store_lock);
  void ReclaimLocked() KVS_REQUIRES(store_lock);
  // Pages that are reclaimed at a time: cheaper than others, and each piece looks at all readers.
  static constexpr size_t kReclaimPages = 1024;
  // With nothing else in hand: others are let in.
  void ReclaimByPieces(Tenant* tenant) KVS_REQUIRES(store_lock);
  // Reclaims at most `most` pages; returns whether there may be more.
  bool ReclaimLocked(Tenant* tenant, size_t most = ~size_t{0}) KVS_REQUIRES(store_lock);

 private:
  void DropLost(PoolId pool) KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  std::array<bool, kMaxPools> dropped_ KVS_GUARDED_BY(store_lock){};  // by PoolId::index
  std::set<Page*> parked_ KVS_GUARDED_BY(store_lock);
};

// PageHolds: the one way to keep a page alive without the store's lock. Whoever reads, writes or
// copies pages outside of it begins a hold under it, adds the pages, and ends the hold under it.
//
// A hold keeps a page in one of two ways. Kept: its bytes stay where they are, while everybody else
// treats it as if nobody held it; it may be evicted and retired, and is parked when all readers
// have passed it, until its last hold ends. Referred to: as by a sequence; it is not evicted, and a
// page that nobody else has yet is the hold's.
//
// Ownership: references are the hold's. Thread-safety: all methods under the store's lock. Cost:
// constant for each page.
class PageHolds {
 public:
  struct Hold {
    std::vector<Page*> kept, referred;
  };
  PageHolds(StoreMutex& mu, PageReferences& references) : mu_(mu), references_(references) {}

  // A hold without pages; never 0.
  uint64_t Begin() KVS_REQUIRES(store_lock);
  void Keep(uint64_t hold, Page* page) KVS_REQUIRES(store_lock);
  // A hold that keeps one page.
  uint64_t Keep(Page* page) KVS_REQUIRES(store_lock);
  void Refer(uint64_t hold, Page* page) KVS_REQUIRES(store_lock);
  // Takes over a reference that somebody had.
  void TakeOver(uint64_t hold, Page* page) KVS_REQUIRES(store_lock);
  // Gives a reference of the hold to the caller.
  void HandOver(uint64_t hold, Page* page) KVS_REQUIRES(store_lock);
  const std::vector<Page*>& kept(uint64_t hold) const KVS_REQUIRES(store_lock) {
    return holds_.at(hold).kept;
  }
  // Releases from the last page to the first. Lets others in where it has many pages, so the caller
  // has nothing else in hand then; at references only in a long request of `session`. 0 is no hold.
  void End(uint64_t hold, Session* session = nullptr) KVS_REQUIRES(store_lock);

  const std::unordered_map<uint64_t, Hold>& all() const KVS_REQUIRES(store_lock) { return holds_; }

 private:
  StoreMutex& mu_;
  PageReferences& references_;
  std::unordered_map<uint64_t, Hold> holds_ KVS_GUARDED_BY(store_lock);
  uint64_t next_ KVS_GUARDED_BY(store_lock) = 1;
};

}  // namespace kvstrata
