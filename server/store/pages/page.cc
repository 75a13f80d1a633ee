// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/page.h"

#include <algorithm>
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
// released together still lies together. The same for the same calls.
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

PagePools::PagePools(PageMemory* memory, uint64_t arena_bytes) : memory_(*memory) {
  pools_.resize(memory_.ids().size());
  for (const PoolId id : memory_.ids()) {
    const uint64_t capacity = memory_.capacity(id), granularity = memory_.granularity(id);
    const uint64_t wanted = arena_bytes == 0 ? DefaultArenaBytes(capacity) : arena_bytes;
    pools_[id.index()].arena_bytes =
        std::min(capacity, RoundDown(std::max(wanted, granularity), granularity));
  }
}

PagePools::~PagePools() {
  on_drop = nullptr;
  while (!arenas_.empty()) Drop(arenas_.begin()->second.get());
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
  const uint64_t granularity = memory_.granularity(id), capacity = memory_.capacity(id);
  const uint64_t left = std::min(capacity - std::min(pool.taken, capacity), most);
  if (bytes > left) return 0;
  const uint64_t needed = RoundDown(bytes + granularity - 1, granularity);
  const uint64_t size = std::min(left, std::max(pool.arena_bytes, needed));
  Result<MappedMemory> block = memory_.Allocate(id, size);
  if (!block.ok()) return 0;
  pool.taken += size;
  const uint32_t number = next_arena_++;
  auto arena = std::make_unique<Arena>(number, id, tenant, writer, std::move(*block));
  by_writer_[{id, tenant, writer}].push_back(arena.get());
  arenas_.emplace(number, std::move(arena));
  return size;
}

void PagePools::Drop(Arena* arena) {
  if (on_drop) on_drop(*arena);
  const auto key = std::make_tuple(arena->pool, arena->tenant, arena->writer);
  std::erase(by_writer_[key], arena);
  if (by_writer_[key].empty()) by_writer_.erase(key);
  pools_[arena->pool.index()].taken -= arena->memory.bytes;
  memory_.Free(arena->pool, std::move(arena->memory));
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

const Arena* PagePools::Find(uint32_t id) const {
  const auto it = arenas_.find(id);
  return it == arenas_.end() ? nullptr : it->second.get();
}

}  // namespace kvstrata
