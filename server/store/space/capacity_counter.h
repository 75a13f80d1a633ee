// SPDX-License-Identifier: Apache-2.0
// CapacityCounter: how many tokens of a model a session could have now, by the rules of
// page_allocator.h. Takes nothing.
//
// Thread-safety: CountCapacity from any thread, the rest under the store's lock. Cost: a look at
// every arena, at the free extents of the session's own, and at the extents of artefacts.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "base/status.h"
#include "server/store/books/capacity.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/page_memory.h"

namespace kvstrata {

class CapacityCounter {
 public:
  CapacityCounter(Books& books, const StoreOptions& options, SessionCatalog& catalog,
                  PageReferences& references, Eviction& eviction, const Plans& plans)
      : books_(books),
        options_(options),
        catalog_(catalog),
        references_(references),
        eviction_(eviction),
        plans_(plans) {}

  // How many tokens of the model, with what the plan keeps beside them in its index, the session
  // could open or grow to as things are. Promises nothing: others may be faster, and an open has
  // limits of its own (SEQUENCE_LIMIT, TABLES_FULL). Frees what readers have left first.
  // SESSION_UNKNOWN, MODEL_UNKNOWN, PLAN_*.
  Result<Capacity> CountCapacity(uint64_t session, uint64_t model, std::string_view plan)
      KVS_EXCLUDES(store_lock);
  // Tokens that fit a sequence that is opened or grown, without evicting.
  uint64_t TokensThatFit(const Taker& taker, const Sequence& s) const KVS_REQUIRES(store_lock);
  // What its tenant may still have of the pool, in whole granules, of which arenas are made.
  uint64_t RoomOf(const Taker& taker, PoolId pool) const KVS_REQUIRES(store_lock);

 private:
  using BytesByArena = std::unordered_map<uint32_t, uint64_t>;

  // Pages of `bytes` that the taker could have of a pool now: free ones, or also those that it
  // would evict, with `unused` bytes of artefacts' extents among them.
  uint64_t CountRoom(const Taker& taker, PoolId pool, uint64_t bytes,
                     const BytesByArena* unused) const KVS_REQUIRES(store_lock);
  // Pages of new arenas that together have `left` bytes.
  uint64_t PagesOfArenas(PoolId pool, uint64_t left, uint64_t bytes) const KVS_REQUIRES(store_lock);
  static bool MayTakeFrom(const Taker& taker, const Arena& arena);
  Slots CountSlots(const Taker& taker, const TokenFit& fit, PoolId pool,
                   const BytesByArena* unused) const KVS_REQUIRES(store_lock);
  // Adds what it has after eviction to `all`.
  PoolCapacity CapacityOf(const Taker& taker, const TokenFit& fit, PoolId pool,
                          const BytesByArena& unused, Slots* all) const KVS_REQUIRES(store_lock);
  // The tokens of an open where `tokens` fit: it keeps pages ahead of its prompt.
  uint32_t OpenTokens(uint64_t tokens) const;

  Books& books_;
  const StoreOptions& options_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  Eviction& eviction_;
  const Plans& plans_;
};

}  // namespace kvstrata
