#include "server/store/page.h"

#include <algorithm>
#include <array>
#include <random>

#include "base/check.h"

namespace kvstrata {
namespace {

// Large enough that few descriptors travel, small enough that many sessions fit in a pool.
uint64_t DefaultArenaBytes(uint64_t capacity) {
  return std::clamp(capacity / 64, uint64_t{16} << 20, uint64_t{256} << 20);
}

uint64_t RoundDown(uint64_t bytes, uint64_t to) { return bytes / to * to; }

// CTAs of an attention read shares of sequences, each share's pages in the order they were taken
// in. Where that is their order in memory, shares that begin at equal distances meet in the same
// channels of it (bench/notes/cuda.md, "Where pages lie"). Few at a time change places: what is
// given back together still lies together. The same for the same calls.
constexpr size_t kScattered = 16;

void Scatter(uint32_t arena, std::span<uint64_t> offsets) {
  if (offsets.size() < 2) return;
  std::seed_seq seed{uint64_t{arena}, offsets.front() / kMemoryGranularity};
  std::mt19937 random(seed);
  for (; !offsets.empty(); offsets = offsets.subspan(std::min(kScattered, offsets.size()))) {
    std::ranges::shuffle(offsets.first(std::min(kScattered, offsets.size())), random);
  }
}

}  // namespace

std::string_view NameOf(Tier tier) { return tier == Tier::kDevice ? "device" : "host"; }

PagePools::PagePools(std::vector<StoreDevice> devices, uint64_t device_bytes,
                     std::unique_ptr<MemoryResource> host, uint64_t host_bytes,
                     uint64_t arena_bytes)
    : pools_(1 + devices.size()) {
  KVS_CHECK(!devices.empty() && pools_.size() <= kMaxPools);
  for (StoreDevice& device : devices) {
    const PoolId pool = PoolId::Device(static_cast<uint32_t>(ids_.size()));
    ids_.push_back(pool);
    pools_[pool.index()].name = std::move(device.name);
    MakePool(pool, std::move(device.memory), std::min(device_bytes, device.bytes), arena_bytes);
  }
  ids_.push_back(PoolId::Host());
  MakePool(PoolId::Host(), std::move(host), host_bytes, arena_bytes);
}

void PagePools::MakePool(PoolId id, std::unique_ptr<MemoryResource> memory, uint64_t capacity,
                         uint64_t arena_bytes) {
  Pool& pool = pools_[id.index()];
  const uint64_t granularity = memory->granularity();
  pool.capacity = RoundDown(capacity, granularity);
  pool.memory = NewLimitedResource(std::move(memory), &pool.capacity);
  const uint64_t wanted = arena_bytes == 0 ? DefaultArenaBytes(capacity) : arena_bytes;
  pool.arena_bytes = std::min(pool.capacity, RoundDown(std::max(wanted, granularity), granularity));
}

PagePools::~PagePools() {
  on_drop = nullptr;
  while (!arenas_.empty()) Drop(arenas_.begin()->second.get());
}

void PagePools::SetCapacity(PoolId id, uint64_t bytes) {
  Pool& pool = pools_[id.index()];
  pool.capacity = RoundDown(bytes, pool.memory->granularity());
}

Page* PagePools::NewRecord() {
  if (free_records_.empty()) return &records_.emplace_back();
  Page* page = free_records_.back();
  free_records_.pop_back();
  return page;
}

uint32_t PagePools::Take(PoolId id, uint32_t tenant, uint64_t writer, uint64_t bytes, uint32_t n,
                         std::vector<Page*>* out) {
  const auto it = by_writer_.find({id, tenant, writer});
  if (it == by_writer_.end()) return 0;
  uint32_t taken = 0;
  std::vector<uint64_t> offsets;
  offsets.reserve(n);
  for (Arena* arena : it->second) {
    if (taken == n) break;
    offsets.clear();
    taken += arena->extents.AllocateMany(bytes, n - taken, &offsets);
    if (id.tier() == Tier::kDevice) Scatter(arena->id, offsets);
    for (const uint64_t offset : offsets) {
      Page* page = NewRecord();
      page->arena = arena;
      page->offset = offset;
      page->bytes = arena->extents.Rounded(bytes);
      pools_[id.index()].used += page->bytes;
      out->push_back(page);
    }
  }
  return taken;
}

bool PagePools::Adopt(PoolId id, uint32_t tenant, uint64_t writer, uint64_t bytes,
                      const std::function<bool(const Arena&)>& may_adopt) {
  const auto it = by_writer_.find({id, tenant, kOrphan});
  if (it == by_writer_.end()) return false;
  for (Arena* arena : it->second) {
    if (arena->extents.largest_free() < bytes || !may_adopt(*arena)) continue;
    std::erase(it->second, arena);
    arena->writer = writer;
    by_writer_[{id, tenant, writer}].push_back(arena);
    return true;
  }
  return false;
}

uint64_t PagePools::AddArena(PoolId id, uint32_t tenant, uint64_t writer, uint64_t bytes,
                             uint64_t most) {
  Pool& pool = pools_[id.index()];
  const uint64_t granularity = pool.memory->granularity();
  const uint64_t left = std::min(pool.capacity - std::min(pool.taken, pool.capacity), most);
  if (bytes > left) return 0;
  const uint64_t needed = RoundDown(bytes + granularity - 1, granularity);
  const uint64_t size = std::min(left, std::max(pool.arena_bytes, needed));
  Result<MemoryBlock> block = pool.memory->Allocate(size);
  if (!Noted(id, block.status()).ok()) return 0;
  pool.taken += size;
  const uint32_t number = next_arena_++;
  auto arena = std::make_unique<Arena>(number, id, tenant, writer, std::move(*block));
  by_writer_[{id, tenant, writer}].push_back(arena.get());
  arenas_.emplace(number, std::move(arena));
  return size;
}

void PagePools::Drop(Arena* arena) {
  if (on_drop) on_drop(*arena);
  Pool& pool = pools_[arena->pool.index()];
  const auto key = std::make_tuple(arena->pool, arena->tenant, arena->writer);
  std::erase(by_writer_[key], arena);
  if (by_writer_[key].empty()) by_writer_.erase(key);
  pool.taken -= arena->block.bytes;
  pool.memory->Free(std::move(arena->block));
  arenas_.erase(arena->id);
}

void PagePools::Free(std::span<Page* const> pages) {
  std::vector<std::pair<const std::byte*, Page*>> sorted;
  sorted.reserve(pages.size());
  for (Page* page : pages) {
    KVS_CHECK(page->arena != nullptr);
    sorted.emplace_back(page->base(), page);
  }
  std::ranges::sort(sorted);
  for (size_t i = 0; i < sorted.size();) {
    Arena* const arena = sorted[i].second->arena;
    KVS_CHECK(arena != nullptr);  // else it is in `pages` twice
    const uint64_t begin = sorted[i].second->offset;
    uint64_t end = begin;
    for (; i < sorted.size(); ++i) {
      Page* const page = sorted[i].second;
      if (page->arena != arena || page->offset != end) break;
      end += page->bytes;
      if (page->retired) arena->retired -= page->bytes;
      FreeRecord(page);
    }
    arena->extents.Free(begin, end - begin);
    pools_[arena->pool.index()].used -= end - begin;
    if (arena->extents.used() == 0 && arena->writer == kOrphan) Drop(arena);
  }
}

void PagePools::FreeRecord(Page* page) {
  KVS_CHECK(page->refs == 0 && !page->indexed);
  *page = Page{};
  free_records_.push_back(page);
}

void PagePools::Orphan(uint64_t session) {
  std::vector<Arena*> empty;
  for (auto& [id, arena] : arenas_) {
    if (arena->writer != session) continue;
    std::erase(by_writer_[{arena->pool, arena->tenant, session}], arena.get());
    by_writer_.erase({arena->pool, arena->tenant, session});
    arena->writer = kOrphan;
    by_writer_[{arena->pool, arena->tenant, kOrphan}].push_back(arena.get());
    if (arena->extents.used() == 0) empty.push_back(arena.get());
  }
  for (Arena* arena : empty) Drop(arena);
}

bool PagePools::DropEmpty(PoolId id, const std::function<bool(const Arena&)>& may_drop) {
  std::vector<Arena*> empty;
  for (auto& [number, arena] : arenas_) {
    if (arena->pool == id && arena->extents.used() == 0 && may_drop(*arena)) {
      empty.push_back(arena.get());
    }
  }
  for (Arena* arena : empty) Drop(arena);
  return !empty.empty();
}

void PagePools::Ref(Page* page) {
  KVS_CHECK(!page->retired);
  if (page->refs++ == 0) ++page->arena->live;
}

void PagePools::Unref(Page* page) {
  KVS_CHECK(page->refs > 0);
  if (--page->refs == 0) --page->arena->live;
}

void PagePools::Retire(Page* page) {
  KVS_CHECK(page->refs == 0 && !page->indexed && !page->retired);
  page->retired = true;
  page->arena->retired += page->bytes;
}

Status PagePools::failure(PoolId pool) const {
  MutexLock lock(failures_mu_);
  return failures_[pool.index()];
}

Status PagePools::Noted(PoolId pool, Status status) const {
  if (status.reason() != "DEVICE_FAILED") return status;
  {
    MutexLock lock(failures_mu_);
    Status& failure = failures_[pool.index()];
    if (!failure.ok()) return status;
    failure = status;
  }
  if (on_failure) on_failure(pool, status);
  return status;
}

// A device knows how to reach the host, not the other way round.
Status PagePools::Copy(std::span<const PageCopy> copies) const {
  std::map<std::pair<PoolId, PoolId>, std::vector<MemoryCopy>> by_pools;
  for (const auto& [from, to, shape] : copies) {
    by_pools[{from->arena->pool, to->arena->pool}].push_back({to->base(), from->base(), shape});
  }
  for (const auto& [pools, some] : by_pools) {
    const auto [from, to] = pools;
    const bool far = from.tier() == Tier::kDevice && to.tier() == Tier::kDevice;
    if (far && from != to) {
      KVS_RETURN_IF_ERROR(CopyAcross(from, to, some));
      continue;
    }
    const PoolId of = from.tier() == Tier::kDevice ? from : to;
    KVS_RETURN_IF_ERROR(Noted(of, pools_[of.index()].memory->Copy(some)));
  }
  return OkStatus();
}

Status PagePools::CopyAcross(PoolId from, PoolId to, std::span<const MemoryCopy> copies) const {
  MemoryResource& source = *pools_[from.index()].memory;
  MemoryResource& destination = *pools_[to.index()].memory;
  const Status status = CopyBetween(source, destination, copies);
  if (status.reason() == "DEVICE_FAILED") {
    (void)Noted(from, source.Copy({}));  // whose is it?
    (void)Noted(to, destination.Copy({}));
  }
  return status;
}

Status PagePools::Read(const Page& from, std::byte* to) const {
  const PoolId pool = from.arena->pool;
  const MemoryCopy copy{to, from.base(), {from.bytes, from.bytes, 1}};
  return Noted(pool, pools_[pool.index()].memory->Copy({&copy, 1}));
}

Status PagePools::Write(const Page& to, const std::byte* from) const {
  const PoolId pool = to.arena->pool;
  const MemoryCopy copy{to.base(), from, {to.bytes, to.bytes, 1}};
  return Noted(pool, pools_[pool.index()].memory->Copy({&copy, 1}));
}

Status PagePools::Fill(const Page& to, std::span<const std::byte> front,
                       std::span<const std::byte> bytes, PoolId of) const {
  static constexpr std::array<std::byte, kMemoryGranularity> kZeros{};
  KVS_CHECK(front.size() <= bytes.size() && bytes.size() <= to.bytes);
  KVS_CHECK(to.bytes - bytes.size() < kZeros.size());
  std::vector<MemoryCopy> copies;
  const auto add = [&](uint64_t at, const std::byte* from, uint64_t n) {
    if (n > 0) copies.push_back({to.base() + at, from, {n, n, 1}});
  };
  add(0, front.data(), front.size());
  add(front.size(), bytes.data() + front.size(), bytes.size() - front.size());
  add(bytes.size(), kZeros.data(), to.bytes - bytes.size());
  return Noted(of, pools_[of.index()].memory->Copy(copies));
}

Status PagePools::Reach(PoolId device, const std::byte* at) const {
  return Noted(device, pools_[device.index()].memory->Reach(at));
}

const Arena* PagePools::Find(uint32_t id) const {
  const auto it = arenas_.find(id);
  return it == arenas_.end() ? nullptr : it->second.get();
}

}  // namespace kvstrata
