// SPDX-License-Identifier: Apache-2.0
// Page records, arenas and pools: who owns which bytes.
//
// An Arena is memory of one tier and tenant, written by one session or by the daemon. A
// Page is an extent of an arena: a KV page or an index block. Pages count references; the life of a
// page is in docs/design.md.
//
// Ownership: PagePools owns arenas and page records; a Page* is valid until PagePools::Free.
// Thread-safety: none; guarded by the store's lock. Units: bytes.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "server/memory/extent_allocator.h"
#include "server/store/pages/page_memory.h"
#include "server/store/pages/prefix_key.h"
#include "server/store/pages/series.h"

namespace kvstrata {

inline constexpr uint64_t kOrphan = 0;             // Arena::writer: nobody; a session may adopt it
inline constexpr uint64_t kDaemon = ~uint64_t{0};  // Arena::writer: filled by Move only
inline constexpr int kTiers = 2;

struct Arena {
  Arena(uint32_t id_, PoolId pool_, uint32_t tenant_, uint64_t writer_, MappedMemory memory_)
      : id(id_),
        pool(pool_),
        tier(pool_.tier()),
        tenant(tenant_),
        writer(writer_),
        memory(std::move(memory_)),
        extents(memory.bytes, kMemoryGranularity) {}

  const uint32_t id;
  const PoolId pool;
  const Tier tier;  // tier of the pool
  const uint32_t tenant;
  uint64_t writer;  // a session, kOrphan or kDaemon
  MappedMemory memory;
  ExtentAllocator extents;
  uint32_t live = 0;     // pages with refs > 0
  uint64_t retired = 0;  // bytes of pages that wait for readers or holds
  uint64_t cached = 0;   // bytes in the prefix index's list of pages that nobody uses
};

struct Page {
  Arena* arena = nullptr;  // null: a free record
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t model = 0;
  uint32_t refs = 0;       // positions in sequences, artefacts, holds
  bool sealed = false;     // full and immutable; `key` is set (pages and index blocks)
  bool indexed = false;    // the prefix index knows it
  bool replica = false;    // indexed, beside another page of the key in another pool
  bool summary = false;    // sealed: an index block, no page
  bool pinned = false;     // by its key; the prefix index's
  bool stored = false;     // it is, or was, in the tier below: dropping it loses nothing
  bool retired = false;    // waits for readers, then is freed
  uint32_t artefacts = 0;  // references that artefacts have (artefacts.h)
  uint32_t keeps = 0;      // holds that keep it without a reference (page_references.h)
  PageKey key{};
  std::unique_ptr<Series> series;  // for a sealed page's positions; null: nothing was reported
  bool series_changed = false;     // since the tier below copied the page
  uint8_t credits = 0;             // how often eviction passes it over: selectors chose it
  Page* older = nullptr;           // the prefix index's list of pages that nobody uses
  Page* newer = nullptr;

  std::byte* base() const { return arena->memory.base + offset; }
};

class PagePools {
 public:
  // `arena_bytes`: of an arena; 0: capacity / 64 within 16 MiB .. 256 MiB. Borrows `memory`.
  PagePools(PageMemory* memory, uint64_t arena_bytes);
  ~PagePools();

  // Takes up to `n` pages of `bytes` from the writer's arenas of a pool; returns how many. They
  // have no references yet. A device's lie side by side, but not in order.
  uint32_t Take(PoolId pool, uint32_t tenant, uint64_t writer, uint64_t bytes, uint32_t n,
                std::vector<Page*>* out);
  // Gives the writer an orphan arena of its tenant with room for `bytes`, if `may_adopt` agrees.
  bool Adopt(PoolId pool, uint32_t tenant, uint64_t writer, uint64_t bytes,
             const std::function<bool(const Arena&)>& may_adopt);
  // Makes an arena of at most `most` bytes, a multiple of its granularity, and returns its size; 0
  // when the pool has no room for one that holds `bytes`.
  uint64_t AddArena(PoolId pool, uint32_t tenant, uint64_t writer, uint64_t bytes,
                    uint64_t most = ~uint64_t{0});
  // Returns the pages' extents and records, neighbours in one piece; an orphan arena that is empty
  // after it goes back too.
  void Free(std::span<Page* const> pages);
  // The session's arenas have no writer any more; empty ones go back.
  void Orphan(uint64_t session);
  // Returns empty arenas for which `may_drop` agrees; whether there was one.
  bool DropEmpty(PoolId pool, const std::function<bool(const Arena&)>& may_drop);

  void Ref(Page* page);
  void Unref(Page* page);
  // From now on it only waits to be freed.
  void Retire(Page* page);

  const Arena* Find(uint32_t id) const;
  uint64_t arena_bytes(PoolId pool) const { return pools_[pool.index()].arena_bytes; }
  uint64_t used(PoolId pool) const { return pools_[pool.index()].used; }
  uint64_t taken(PoolId pool) const { return pools_[pool.index()].taken; }
  const std::unordered_map<uint32_t, std::unique_ptr<Arena>>& arenas() const { return arenas_; }
  const std::deque<Page>& records() const { return records_; }

  // Called before an arena disappears.
  std::function<void(const Arena&)> on_drop;

 private:
  struct Pool {
    uint64_t arena_bytes = 0;
    uint64_t taken = 0;  // by arenas
    uint64_t used = 0;   // by pages in the arenas
  };
  void Drop(Arena* arena);
  Page* NewRecord();
  void FreeRecord(Page* page);

  PageMemory& memory_;
  std::vector<Pool> pools_;  // by PoolId::index
  std::unordered_map<uint32_t, std::unique_ptr<Arena>> arenas_;
  // Where to look for free space: (pool, tenant, writer) -> arenas in order of age.
  std::map<std::tuple<PoolId, uint32_t, uint64_t>, std::vector<Arena*>> by_writer_;
  std::deque<Page> records_;  // addresses are stable
  std::vector<Page*> free_records_;
  uint32_t next_arena_ = 1;
};

}  // namespace kvstrata
