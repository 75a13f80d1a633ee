// SPDX-License-Identifier: Apache-2.0
// Relief: what a pool does that is above its high mark, or beyond its capacity: pages that nobody
// uses go from device to host while that has room, else they are evicted.
//
// Thread-safety: methods that say so are called under the store's lock, RelieveSome by one thread
// at a time. Bytes are copied outside of the lock. Cost: of copies; a look at all arenas of a pool.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>

#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"
#include "server/store/space/page_copies.h"

namespace kvstrata {

class Relief {
 public:
  Relief(Books& books, SessionCatalog& catalog, PageReferences& references, PageHolds& holds,
         PageAllocator& allocator, Eviction& eviction, PageCopies& copies, Watermarks& watermarks)
      : books_(books),
        catalog_(catalog),
        references_(references),
        holds_(holds),
        allocator_(allocator),
        eviction_(eviction),
        copies_(copies),
        watermarks_(watermarks) {}

  // A piece of at most `bytes`: the bytes that were copied. Nothing: the pool needs no relief, or
  // nothing of it can go.
  std::optional<uint64_t> RelieveSome(PoolId pool, uint64_t bytes) KVS_EXCLUDES(store_lock);
  // Releases arenas beyond the capacity, as far as nobody uses them.
  void ShrinkToCapacity(PoolId pool) KVS_REQUIRES(store_lock);
  // Bytes of used pages that are not retired.
  uint64_t HeldBytes(PoolId pool) const KVS_REQUIRES(store_lock);

 private:
  std::unordered_map<const Arena*, uint64_t> RetiredBytes(PoolId pool) const
      KVS_REQUIRES(store_lock);
  // Has host make room down to its low mark for what `device` has cached; false: it does, or that
  // would be of no use.
  bool MakeHostRelieve(PoolId device) KVS_REQUIRES(store_lock);
  // Copies to be for the coldest pages of `device`, as many as host has free room for: the plan
  // refers to the copies, and keeps the sources, which may be used or evicted meanwhile.
  CopyPlan PlanDemotion(PoolId device, uint64_t bytes) KVS_REQUIRES(store_lock);
  uint64_t FinishDemotion(const CopyPlan& plan, bool copied) KVS_REQUIRES(store_lock);
  // Both return the bytes of what went; replicas only among the coldest.
  uint64_t EvictReplicas(PoolId pool, uint64_t bytes) KVS_REQUIRES(store_lock);
  uint64_t EvictColdest(PoolId pool, uint64_t bytes) KVS_REQUIRES(store_lock);
  // Evicts all of an arena that nobody uses; whether there was one.
  bool EmptyAnArena(PoolId pool) KVS_REQUIRES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  PageHolds& holds_;
  PageAllocator& allocator_;
  Eviction& eviction_;
  PageCopies& copies_;
  Watermarks& watermarks_;
  std::array<bool, kMaxPools> relieving_ KVS_GUARDED_BY(store_lock){};  // between the marks
};

}  // namespace kvstrata
