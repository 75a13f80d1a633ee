// SPDX-License-Identifier: Apache-2.0
// Replication: a prefix that lies on another device. A session maps only its own device's arenas,
// so what it opens on is copied there first and entered beside the original: its readers keep it,
// and the next session of this device finds the copy.
//
// Thread-safety: methods that say so are called under the store's lock, all others without it, from
// any thread. Cost: of copies.
#pragma once

#include <functional>
#include <vector>

#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

class Replication {
 public:
  using Post = std::function<void(std::function<void()>)>;
  Replication(Books& books, SessionCatalog& catalog, PageReferences& references,
              PageAllocator& allocator, PageCopies& copies, PrefixCatalog& prefixes,
              PrefixLoads& loads)
      : books_(books),
        catalog_(catalog),
        references_(references),
        allocator_(allocator),
        copies_(copies),
        prefixes_(prefixes),
        loads_(loads) {}

  // Where opens that have to copy a prefix from another device, or to read a plan's parameters, go
  // on: `post` has each function run once, one after the other, in a thread that may wait, and the
  // store outlives that. Null: they do so in the caller's thread.
  void SetReplicationQueue(Post post) KVS_EXCLUDES(store_lock);
  Post SlowOpens() const KVS_EXCLUDES(store_lock);

  // Copies what of the prefix lies on another device to the session's, beside its pages; what could
  // not be copied is a miss. Takes as long as the copies.
  void Replicate(Opening* o) KVS_EXCLUDES(store_lock);
  // Runs `then`, which replicates the opening: in the replication queue's thread if there is
  // something to copy, else at once in this one.
  void GoOn(const Opening& o, std::function<void()> then) KVS_EXCLUDES(store_lock);

 private:
  // The held prefix, if some of it does not lie on the session's device; else nothing.
  std::vector<Page*> PrefixElsewhere(const Opening& o) KVS_REQUIRES(store_lock);
  bool IsOn(uint32_t device, const Page& page) const KVS_REQUIRES(store_lock);
  // For pages that the opening's load holds.
  CopyPlan PlanReplicas(Opening* o) KVS_REQUIRES(store_lock);
  void EnterReplica(const Page& source, Page* copy, uint32_t device) KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  PageAllocator& allocator_;
  PageCopies& copies_;
  PrefixCatalog& prefixes_;
  PrefixLoads& loads_;
  Post post_ KVS_GUARDED_BY(store_lock);
};

}  // namespace kvstrata
