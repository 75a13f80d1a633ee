// SPDX-License-Identifier: Apache-2.0
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
#ifndef KVSTRATA_SERVER_STORE_REFERENCES_PAGE_HOLDS_H_
#define KVSTRATA_SERVER_STORE_REFERENCES_PAGE_HOLDS_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "server/store/options/store_lock.h"

namespace kvstrata {

struct Page;
class PageReferences;
struct Session;

class PageHolds {
 public:
  struct Hold {
    std::vector<Page*> kept, referred;
  };
  PageHolds(StoreMutex& mu, PageReferences& references);

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

#endif  // KVSTRATA_SERVER_STORE_REFERENCES_PAGE_HOLDS_H_
