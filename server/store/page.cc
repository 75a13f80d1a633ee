#include "server/store/page.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace kvstrata {
namespace {

// Large enough that few descriptors travel, small enough that many sessions fit in a pool.
uint64_t DefaultArenaBytes(uint64_t capacity) {
  return std::clamp(capacity / 64, uint64_t{16} << 20, uint64_t{256} << 20);
}

uint64_t RoundDown(uint64_t bytes, uint64_t to) { return bytes / to * to; }

}  // namespace

std::string_view NameOf(Tier tier) { return tier == Tier::kDevice ? "device" : "host"; }

PagePools::PagePools(std::unique_ptr<MemoryResource> device, uint64_t device_bytes,
                     std::unique_ptr<MemoryResource> host, uint64_t host_bytes,
                     uint64_t arena_bytes) {
  auto fill = [&](Tier tier, std::unique_ptr<MemoryResource> memory, uint64_t capacity) {
    Pool& pool = pools_[static_cast<int>(tier)];
    const uint64_t granularity = memory->granularity();
    pool.capacity = RoundDown(capacity, granularity);
    pool.memory = NewLimitedResource(std::move(memory), &pool.capacity);
    const uint64_t wanted = arena_bytes == 0 ? DefaultArenaBytes(capacity) : arena_bytes;
    pool.arena_bytes =
        std::min(pool.capacity, RoundDown(std::max(wanted, granularity), granularity));
  };
  fill(Tier::kDevice, std::move(device), device_bytes);
  fill(Tier::kHost, std::move(host), host_bytes);
}

PagePools::~PagePools() {
  on_drop = nullptr;
  while (!arenas_.empty()) Drop(arenas_.begin()->second.get());
}

void PagePools::SetCapacity(Tier tier, uint64_t bytes) {
  Pool& pool = pools_[static_cast<int>(tier)];
  pool.capacity = RoundDown(bytes, pool.memory->granularity());
}

Page* PagePools::NewRecord() {
  if (free_records_.empty()) return &records_.emplace_back();
  Page* page = free_records_.back();
  free_records_.pop_back();
  return page;
}

uint32_t PagePools::Take(Tier tier, uint32_t tenant, uint64_t writer, uint64_t bytes, uint32_t n,
                         std::vector<Page*>* out) {
  const auto it = by_writer_.find({static_cast<int>(tier), tenant, writer});
  if (it == by_writer_.end()) return 0;
  uint32_t taken = 0;
  std::vector<uint64_t> offsets;
  offsets.reserve(n);
  for (Arena* arena : it->second) {
    if (taken == n) break;
    offsets.clear();
    taken += arena->extents.AllocateMany(bytes, n - taken, &offsets);
    for (const uint64_t offset : offsets) {
      Page* page = NewRecord();
      page->arena = arena;
      page->offset = offset;
      page->bytes = arena->extents.Rounded(bytes);
      pools_[static_cast<int>(tier)].used += page->bytes;
      out->push_back(page);
    }
  }
  return taken;
}

bool PagePools::Adopt(Tier tier, uint32_t tenant, uint64_t writer, uint64_t bytes,
                      const std::function<bool(const Arena&)>& may_adopt) {
  const auto it = by_writer_.find({static_cast<int>(tier), tenant, kOrphan});
  if (it == by_writer_.end()) return false;
  for (Arena* arena : it->second) {
    if (arena->extents.largest_free() < bytes || !may_adopt(*arena)) continue;
    std::erase(it->second, arena);
    arena->writer = writer;
    by_writer_[{static_cast<int>(tier), tenant, writer}].push_back(arena);
    return true;
  }
  return false;
}

bool PagePools::AddArena(Tier tier, uint32_t tenant, uint64_t writer, uint64_t bytes) {
  Pool& pool = pools_[static_cast<int>(tier)];
  const uint64_t left = pool.capacity - std::min(pool.taken, pool.capacity);
  if (bytes > left) return false;
  const uint64_t granularity = pool.memory->granularity();
  const uint64_t needed = RoundDown(bytes + granularity - 1, granularity);
  const uint64_t size = std::min(left, std::max(pool.arena_bytes, needed));
  Result<MemoryBlock> block = pool.memory->Allocate(size);
  if (!Noted(tier, block.status()).ok()) return false;
  pool.taken += size;
  const uint32_t id = next_arena_++;
  auto arena = std::make_unique<Arena>(id, tier, tenant, writer, std::move(*block));
  by_writer_[{static_cast<int>(tier), tenant, writer}].push_back(arena.get());
  arenas_.emplace(id, std::move(arena));
  return true;
}

void PagePools::Drop(Arena* arena) {
  if (on_drop) on_drop(*arena);
  Pool& pool = pools_[static_cast<int>(arena->tier)];
  const auto key = std::make_tuple(static_cast<int>(arena->tier), arena->tenant, arena->writer);
  std::erase(by_writer_[key], arena);
  if (by_writer_[key].empty()) by_writer_.erase(key);
  pool.taken -= arena->block.bytes;
  pool.memory->Free(std::move(arena->block));
  arenas_.erase(arena->id);
}

void PagePools::Free(std::span<Page* const> pages) {
  for (size_t i = 0; i < pages.size();) {
    Arena* const arena = pages[i]->arena;
    KVS_CHECK(arena != nullptr);
    uint64_t begin = pages[i]->offset, end = begin;
    for (; i < pages.size() && pages[i]->arena == arena; ++i) {
      const Page& page = *pages[i];
      if (page.offset == end) {
        end += page.bytes;
      } else if (page.offset + page.bytes == begin) {
        begin = page.offset;
      } else {
        break;
      }
      FreeRecord(pages[i]);
    }
    arena->extents.Free(begin, end - begin);
    pools_[static_cast<int>(arena->tier)].used -= end - begin;
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
    const int tier = static_cast<int>(arena->tier);
    std::erase(by_writer_[{tier, arena->tenant, session}], arena.get());
    by_writer_.erase({tier, arena->tenant, session});
    arena->writer = kOrphan;
    by_writer_[{tier, arena->tenant, kOrphan}].push_back(arena.get());
    if (arena->extents.used() == 0) empty.push_back(arena.get());
  }
  for (Arena* arena : empty) Drop(arena);
}

bool PagePools::DropEmpty(Tier tier, const std::function<bool(const Arena&)>& may_drop) {
  std::vector<Arena*> empty;
  for (auto& [id, arena] : arenas_) {
    if (arena->tier == tier && arena->extents.used() == 0 && may_drop(*arena)) {
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

Status PagePools::failure(Tier tier) const {
  MutexLock lock(failures_mu_);
  return failures_[static_cast<size_t>(tier)];
}

Status PagePools::Noted(Tier tier, Status status) const {
  if (status.reason() != "DEVICE_FAILED") return status;
  {
    MutexLock lock(failures_mu_);
    Status& failure = failures_[static_cast<size_t>(tier)];
    if (!failure.ok()) return status;
    failure = status;
  }
  if (on_failure) on_failure(tier, status);
  return status;
}

// The device knows how to reach the host, not the other way round.
Status PagePools::Copy(std::span<const PageCopy> copies) const {
  std::array<std::vector<MemoryCopy>, kTiers> by_tier;
  for (const auto& [from, to, shape] : copies) {
    const bool device = from->arena->tier == Tier::kDevice || to->arena->tier == Tier::kDevice;
    by_tier[static_cast<size_t>(device ? Tier::kDevice : Tier::kHost)].push_back(
        {to->base(), from->base(), shape});
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    const auto i = static_cast<size_t>(tier);
    if (by_tier[i].empty()) continue;
    KVS_RETURN_IF_ERROR(Noted(tier, pools_[i].memory->Copy(by_tier[i])));
  }
  return OkStatus();
}

Status PagePools::Read(const Page& from, std::byte* to) const {
  const Tier tier = from.arena->tier;
  const MemoryCopy copy{to, from.base(), {from.bytes, from.bytes, 1}};
  return Noted(tier, pools_[static_cast<size_t>(tier)].memory->Copy({&copy, 1}));
}

Status PagePools::Write(const Page& to, const std::byte* from) const {
  const Tier tier = to.arena->tier;
  const MemoryCopy copy{to.base(), from, {to.bytes, to.bytes, 1}};
  return Noted(tier, pools_[static_cast<size_t>(tier)].memory->Copy({&copy, 1}));
}

Status PagePools::Fill(const Page& to, std::span<const std::byte> bytes, Tier of) const {
  static constexpr std::array<std::byte, kMemoryGranularity> kZeros{};
  const uint64_t left = to.bytes - bytes.size();
  KVS_CHECK(bytes.size() <= to.bytes && left < kZeros.size());
  const std::array copies = {MemoryCopy{to.base(), bytes.data(), {bytes.size(), bytes.size(), 1}},
                             MemoryCopy{to.base() + bytes.size(), kZeros.data(), {left, left, 1}}};
  return Noted(
      of, pools_[static_cast<size_t>(of)].memory->Copy(std::span(copies).first(left == 0 ? 1 : 2)));
}

Status PagePools::Reach(const std::byte* at) const {
  return Noted(Tier::kDevice, pools_[static_cast<size_t>(Tier::kDevice)].memory->Reach(at));
}

const Arena* PagePools::Find(uint32_t id) const {
  const auto it = arenas_.find(id);
  return it == arenas_.end() ? nullptr : it->second.get();
}

}  // namespace kvstrata
