// SPDX-License-Identifier: Apache-2.0
#include "server/store/space/relief.h"

#include <algorithm>
#include <set>
#include <vector>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/eviction.h"
#include "server/store/references/page_references.h"
#include "server/store/references/watermarks.h"
#include "server/store/space/page_allocator.h"

namespace kvstrata {
namespace {

constexpr size_t kEvictions = 256;  // pages, under the lock

}  // namespace

std::unordered_map<const Arena*, uint64_t> Relief::RetiredBytes(PoolId pool) const {
  std::unordered_map<const Arena*, uint64_t> bytes;
  for (const auto& [id, arena] : books_.pools.arenas()) {
    if (arena->pool == pool && arena->retired != 0) bytes[arena.get()] = arena->retired;
  }
  return bytes;
}

uint64_t Relief::HeldBytes(PoolId pool) const {
  uint64_t held = books_.pools.used(pool);
  for (const auto& [arena, bytes] : RetiredBytes(pool)) held -= bytes;
  return held;
}

std::optional<uint64_t> Relief::RelieveSome(PoolId pool, uint64_t bytes) {
  const bool device = pool.tier() == Tier::kDevice;
  CopyPlan demotions;
  {
    StoreLock lock(books_.mu);
    ShrinkToCapacity(pool);
    bool& relieving = relieving_[pool.index()];
    const uint64_t held = HeldBytes(pool), low = watermarks_.LowMark(pool);
    if (held > watermarks_.HighMark(pool)) relieving = true;
    if (held <= low) relieving = false;
    if (!relieving) return std::nullopt;
    const uint64_t wanted = std::min(bytes, held - low);
    if (EvictReplicas(pool, wanted) > 0) return 0;
    if (device) demotions = PlanDemotion(pool, wanted);
    if (demotions.copies.empty()) {
      if (device && MakeHostRelieve(pool)) return 0;
      if (EvictColdest(pool, wanted) > 0 || eviction_.EvictArtefact(pool)) return 0;
      relieving = false;  // all of it is in use
      return std::nullopt;
    }
  }
  const bool copied = copies_.Copy(demotions, Geometry{}).ok();
  StoreLock lock(books_.mu);
  return FinishDemotion(demotions, copied);
}

// When host is full of what is colder than what is to come, that goes first.
bool Relief::MakeHostRelieve(PoolId device) {
  constexpr PoolId kHost = PoolId::Host();
  bool& relieving = relieving_[kHost.index()];
  const bool wanted = !relieving && books_.prefix.cached_bytes(device) > 0 &&
                      books_.prefix.cached_bytes(kHost) > 0 &&
                      HeldBytes(kHost) > watermarks_.LowMark(kHost);
  relieving = relieving || wanted;
  return wanted;
}

CopyPlan Relief::PlanDemotion(PoolId device, uint64_t bytes) {
  CopyPlan demotions;
  const uint64_t high = watermarks_.HighMark(PoolId::Host());
  const uint64_t room = high - std::min(high, HeldBytes(PoolId::Host()));
  uint64_t planned = 0;
  for (Page *page = books_.prefix.oldest(device), *next = nullptr; page != nullptr; page = next) {
    next = page->newer;
    if (page->summary) continue;  // small, and read by every selection
    if (page->credits > 0) {
      next = books_.prefix.Spare(page);
      continue;
    }
    if (planned >= bytes || planned + page->bytes > room) break;
    const Taker taker{catalog_.tenant(page->arena->tenant),
                      kDaemon,
                      nullptr,
                      page->model,
                      {PoolId::Host()},
                      false};
    std::vector<Page*> copy;
    if (!allocator_.Allocate(taker, page->bytes, 1, &copy).ok()) break;
    if (demotions.hold == 0) demotions.hold = holds_.Begin();
    holds_.Refer(demotions.hold, copy.front());
    holds_.Keep(demotions.hold, page);
    demotions.copies.push_back({page, copy.front()});
    planned += page->bytes;
  }
  return demotions;
}

uint64_t Relief::FinishDemotion(const CopyPlan& demotions, bool copied) {
  uint64_t bytes = 0;
  std::set<Tenant*> tenants;
  for (const PlannedCopy& d : demotions.copies) {
    tenants.insert(catalog_.tenant(d.copy->arena->tenant));
    const bool wanted = copied && d.source->indexed && d.source->refs == 0;
    if (wanted) {
      holds_.HandOver(demotions.hold, d.copy);
      books_.pools.Unref(d.copy);
      copies_.TakeOver(d.source, d.copy);
      references_.Retire(d.source);
      bytes += d.copy->bytes;
      ++books_.counters.demoted_pages;
      books_.counters.demoted_bytes += d.copy->bytes;
    }  // else somebody uses the page again, or it was evicted
  }
  holds_.End(demotions.hold);
  for (Tenant* tenant : tenants) references_.Advance(tenant);
  references_.ReclaimLocked();
  return bytes;
}

// The key's page stays, elsewhere: nothing is lost, and host has no use for a second one.
uint64_t Relief::EvictReplicas(PoolId pool, uint64_t bytes) {
  uint64_t evicted = 0;
  if (books_.prefix.replicas() == 0) return evicted;
  std::set<Tenant*> tenants;
  size_t seen = 0;
  for (Page *page = books_.prefix.oldest(pool), *next = nullptr;
       page != nullptr && evicted < bytes && seen < kEvictions; page = next, ++seen) {
    next = page->newer;
    if (!page->replica) continue;
    evicted += page->bytes;
    tenants.insert(catalog_.tenant(page->arena->tenant));
    eviction_.EvictPage(page);
  }
  for (Tenant* tenant : tenants) references_.Advance(tenant);
  if (evicted > 0) references_.ReclaimLocked();
  return evicted;
}

uint64_t Relief::EvictColdest(PoolId pool, uint64_t bytes) {
  uint64_t evicted = 0;
  size_t pages = 0;
  std::set<Tenant*> tenants;
  Page* next = nullptr;
  for (Page* page = books_.prefix.oldest(pool);
       page != nullptr && evicted < bytes && pages < kEvictions; page = next) {
    if (page->credits > 0) {
      next = books_.prefix.Spare(page);
      continue;
    }
    next = page->newer;
    evicted += page->bytes;
    ++pages;
    tenants.insert(catalog_.tenant(page->arena->tenant));
    eviction_.EvictPage(page);
  }
  for (Tenant* tenant : tenants) references_.Advance(tenant);
  references_.ReclaimLocked();
  return evicted;
}

void Relief::ShrinkToCapacity(PoolId pool) {
  const auto may_drop = [this](const Arena& arena)
                            KVS_NO_THREAD_SAFETY_ANALYSIS { return !catalog_.Fenced(arena); };
  while (books_.pools.taken(pool) > books_.memory.capacity(pool)) {
    references_.ReclaimLocked();
    books_.pools.DropEmpty(pool, may_drop);
    uint64_t coming = 0;  // bytes of arenas that only their last readers hold
    for (const auto& [arena, bytes] : RetiredBytes(pool)) {
      if (bytes == arena->extents.used()) coming += arena->memory.bytes;
    }
    if (books_.pools.taken(pool) <= books_.memory.capacity(pool) + coming) return;
    if (!EmptyAnArena(pool) && !eviction_.EvictArtefact(pool)) return;
  }
}

bool Relief::EmptyAnArena(PoolId pool) {
  std::unordered_map<const Arena*, std::vector<Page*>> cached;
  for (Page* page = books_.prefix.oldest(pool); page != nullptr; page = page->newer) {
    if (page->arena->live == 0 && !catalog_.Fenced(*page->arena))
      cached[page->arena].push_back(page);
  }
  const std::unordered_map<const Arena*, uint64_t> retired = RetiredBytes(pool);
  for (Page* page = books_.prefix.oldest(pool); page != nullptr; page = page->newer) {
    const auto found = cached.find(page->arena);
    if (found == cached.end()) continue;
    const auto gone = retired.find(page->arena);
    uint64_t bytes = gone == retired.end() ? 0 : gone->second;
    for (const Page* p : found->second) bytes += p->bytes;
    if (bytes != page->arena->extents.used()) {  // a pin keeps some of it
      cached.erase(found);
      continue;
    }
    Tenant* tenant = catalog_.tenant(page->arena->tenant);
    for (Page* p : found->second) eviction_.EvictPage(p);
    references_.Advance(tenant);
    return true;
  }
  return false;
}

}  // namespace kvstrata
