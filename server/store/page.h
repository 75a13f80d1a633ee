// Page records, arenas and pools: who owns which bytes.
//
// An Arena is one memory block of one tier and tenant, written by one session or by the daemon. A
// Page is an extent of an arena: a KV page or an index block. Pages count references; the life of a
// page is in docs/design.md.
//
// Ownership: PagePools owns arenas and page records; a Page* is valid until PagePools::Free.
// Thread-safety: none; guarded by the store's lock. Units: bytes.
#ifndef KVSTRATA_SERVER_STORE_PAGE_H_
#define KVSTRATA_SERVER_STORE_PAGE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/sync.h"
#include "server/memory/extent_allocator.h"
#include "server/memory/memory_resource.h"
#include "server/store/prefix_key.h"
#include "server/store/series.h"
#include "server/store/store.h"

namespace kvstrata {

inline constexpr uint64_t kOrphan = 0;             // Arena::writer: nobody; a session may adopt it
inline constexpr uint64_t kDaemon = ~uint64_t{0};  // Arena::writer: filled by Move only
inline constexpr int kTiers = 2;
inline constexpr size_t kMaxPools = 1 + PoolId::kMaxDevices;

struct Arena {
  Arena(uint32_t id_, PoolId pool_, uint32_t tenant_, uint64_t writer_, MemoryBlock block_)
      : id(id_),
        pool(pool_),
        tier(pool_.tier()),
        tenant(tenant_),
        writer(writer_),
        block(std::move(block_)),
        extents(block.bytes, kMemoryGranularity) {}

  const uint32_t id;
  const PoolId pool;
  const Tier tier;  // of the pool
  const uint32_t tenant;
  uint64_t writer;  // a session, kOrphan or kDaemon
  MemoryBlock block;
  ExtentAllocator extents;
  uint32_t live = 0;     // pages with refs > 0
  uint64_t retired = 0;  // bytes of pages that wait for readers or jobs
  uint64_t cached = 0;   // bytes in the prefix index's list of pages that nobody uses
};

struct Page {
  Arena* arena = nullptr;  // null: a free record
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t model = 0;
  uint32_t refs = 0;       // positions in sequences, and copies under way
  bool sealed = false;     // full and immutable; `key` is set (pages and index blocks)
  bool indexed = false;    // the prefix index knows it
  bool replica = false;    // indexed, beside another page of the key in another pool
  bool summary = false;    // sealed: an index block, no page
  bool pinned = false;     // by its key; the prefix index's
  bool stored = false;     // it is, or was, in the tier below: dropping it loses nothing
  bool retired = false;    // waits for readers, then is freed
  uint32_t artefacts = 0;  // of the references: artefacts (artefacts.h)
  uint32_t jobs = 0;       // who read it without a reference (RecompressJob, CopySealed): it is not
                           // freed before they end
  PageKey key{};
  std::unique_ptr<Series> series;  // of a sealed page's positions; null: nothing was reported
  bool series_changed = false;     // since the tier below copied the page
  uint8_t chances = 0;             // how often eviction passes it over: selectors chose it
  Page* older = nullptr;           // the prefix index's list of pages that nobody uses
  Page* newer = nullptr;

  std::byte* base() const { return arena->block.base + offset; }
};

struct PageCopy {
  const Page* from = nullptr;
  const Page* to = nullptr;
  CopyShape shape;
};

class PagePools {
 public:
  // `device_bytes` and `host_bytes`: capacities, of a device at most its own; `arena_bytes`: of an
  // arena, 0 is DefaultArenaBytes.
  PagePools(std::vector<StoreDevice> devices, uint64_t device_bytes,
            std::unique_ptr<MemoryResource> host, uint64_t host_bytes, uint64_t arena_bytes);
  ~PagePools();

  // The devices', in their order, then the host's. Constant.
  std::span<const PoolId> ids() const { return ids_; }
  size_t devices() const { return ids_.size() - 1; }
  // A device's name; "" for the host. Constant.
  const std::string& name(PoolId pool) const { return pools_[pool.index()].name; }

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

  // Any thread, while all pages are pinned. All are on their way at once.
  Status Copy(std::span<const PageCopy> copies) const;
  // All of a page's bytes to or from memory of the daemon that is in no pool; likewise.
  Status Read(const Page& from, std::byte* to) const;
  Status Write(const Page& to, const std::byte* from) const;
  // The first bytes of a page, and zeros behind them; likewise. `front`: memory of the host that
  // has the first of them instead. `of`: whose memory copies them, the page's own pool or that of a
  // device, which reaches its own memory too. REQUIRES: less than one granule is left.
  Status Fill(const Page& to, std::span<const std::byte> front, std::span<const std::byte> bytes,
              PoolId of) const;
  // Lets kernels of a device follow addresses of an arena that has pinned pages; likewise.
  Status Reach(PoolId device, const std::byte* at) const;
  // Somebody found out that a pool's device is lost.
  void Lose(PoolId pool, const Status& why) const { (void)Noted(pool, why); }
  // Why a pool's device is lost, DEVICE_FAILED; OK while it is not. Any thread.
  Status failure(PoolId pool) const KVS_EXCLUDES(failures_mu_);
  // Whether the daemon may follow the tier's addresses.
  bool readable(Tier tier) const { return memory(tier) == Memory::kMemfd; }
  Memory memory(Tier tier) const {
    return pools_[(tier == Tier::kHost ? PoolId::Host() : PoolId::Device(0)).index()]
        .memory->memory();
  }

  const Arena* Find(uint32_t id) const;
  // `bytes` is rounded down to whole granules; what is taken beyond it stays until it is dropped.
  void SetCapacity(PoolId pool, uint64_t bytes);
  uint64_t granularity(PoolId pool) const { return pools_[pool.index()].memory->granularity(); }
  uint64_t capacity(PoolId pool) const { return pools_[pool.index()].capacity; }
  uint64_t arena_bytes(PoolId pool) const { return pools_[pool.index()].arena_bytes; }
  uint64_t used(PoolId pool) const { return pools_[pool.index()].used; }
  uint64_t taken(PoolId pool) const { return pools_[pool.index()].taken; }
  const std::unordered_map<uint32_t, std::unique_ptr<Arena>>& arenas() const { return arenas_; }
  const std::deque<Page>& records() const { return records_; }

  // Called before an arena disappears.
  std::function<void(const Arena&)> on_drop;
  // Called once for a pool whose device is lost, by whoever found it out: in any thread, with or
  // without the store's lock.
  std::function<void(PoolId, const Status&)> on_failure;

 private:
  struct Pool {
    std::string name;
    uint64_t capacity = 0;  // `memory` looks at it
    std::unique_ptr<MemoryResource> memory;
    uint64_t arena_bytes = 0;
    uint64_t taken = 0;  // by arenas
    uint64_t used = 0;   // of them by pages
  };
  void Drop(Arena* arena);
  void MakePool(PoolId id, std::unique_ptr<MemoryResource> memory, uint64_t capacity,
                uint64_t arena_bytes);
  // The status, kept if it says that the pool's device is lost.
  Status Noted(PoolId pool, Status status) const KVS_EXCLUDES(failures_mu_);
  // Copies from one device to another.
  Status CopyAcross(PoolId from, PoolId to, std::span<const MemoryCopy> copies) const
      KVS_EXCLUDES(failures_mu_);
  Page* NewRecord();
  void FreeRecord(Page* page);

  std::vector<PoolId> ids_;
  std::vector<Pool> pools_;  // by PoolId::index; never resized
  mutable Mutex failures_mu_;
  mutable std::array<Status, kMaxPools> failures_ KVS_GUARDED_BY(failures_mu_);
  std::unordered_map<uint32_t, std::unique_ptr<Arena>> arenas_;
  // Where to look for free space: (pool, tenant, writer) -> arenas in order of age.
  std::map<std::tuple<PoolId, uint32_t, uint64_t>, std::vector<Arena*>> by_writer_;
  std::deque<Page> records_;  // addresses are stable
  std::vector<Page*> free_records_;
  uint32_t next_arena_ = 1;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_PAGE_H_
