// SPDX-License-Identifier: Apache-2.0
// PageAllocator: pages for whoever needs them. On a shortage, in this order: what is retired and
// passed by all readers, orphan arenas, new arenas, cached prefix pages nobody uses (oldest first),
// artefacts nobody uses, the next pool; else POOL_EXHAUSTED, with nothing taken.
//
// Ownership: pages are the taker's to refer to. Thread-safety: all methods under the store's lock.
// Cost: constant for each page while there is room; an eviction looks at all cached pages of a
// pool.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "server/store/books/books.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

// What was not to be had.
struct Shortage {
  uint64_t bytes = 0;  // bytes of a page
  uint32_t pages = 0, got = 0;
  std::optional<uint64_t> fits;  // tokens that the sequence could have now
};

class PageAllocator {
 public:
  PageAllocator(const std::shared_ptr<UserLimits>& user_limits, Books& books,
                SessionCatalog& catalog, PageReferences& references, CapacityCounter& capacity,
                Eviction& eviction, Watermarks& watermarks);

  // Adds `n` pages without references, or none.
  Status Allocate(const Taker& taker, uint64_t bytes, uint32_t n, std::vector<Page*>* out)
      KVS_REQUIRES(store_lock);
  // Takes up to `n`; what became of them all is for the caller to settle.
  uint32_t AllocateSome(const Taker& taker, uint64_t bytes, uint32_t n, std::vector<Page*>* out)
      KVS_REQUIRES(store_lock);
  // POOL_EXHAUSTED.
  Status Exhausted(const Taker& taker, const Shortage& shortage) const KVS_REQUIRES(store_lock);
  // Gives `s` the pages and index blocks that it is short of for `tokens`, a reference each; all or
  // nothing. No table names them yet.
  Status TakeUpTo(Session* session, Sequence* s, uint64_t tokens) KVS_REQUIRES(store_lock);

 private:
  // Whether its tenant may not have so much more of the pool. What others have would not help then.
  bool AtLimit(const Taker& taker, PoolId pool, uint64_t bytes) const KVS_REQUIRES(store_lock);
  uint32_t AllocateIn(const Taker& taker, PoolId pool, uint64_t bytes, uint32_t n,
                      std::vector<Page*>* out) KVS_REQUIRES(store_lock);
  // Adds `n` pages with a reference each, or none; how many could be had.
  uint32_t TakeByPieces(Session* session, Taker taker, uint64_t bytes, uint32_t n,
                        std::vector<Page*>* out) KVS_REQUIRES(store_lock);
  // Releases those behind the first `left`, which no table has named.
  void Untake(Session* session, std::vector<Page*>* pages, size_t left) KVS_REQUIRES(store_lock);
  // Makes an arena for `bytes` within what its tenant may have.
  bool AddArena(const Taker& taker, PoolId pool, uint64_t bytes) KVS_REQUIRES(store_lock);

  const std::shared_ptr<UserLimits>& user_limits_;
  Books& books_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  CapacityCounter& capacity_;
  Eviction& eviction_;
  Watermarks& watermarks_;
};

}  // namespace kvstrata
