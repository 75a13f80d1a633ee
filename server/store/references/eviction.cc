// SPDX-License-Identifier: Apache-2.0
#include "server/store/references/eviction.h"

#include <numeric>
#include <optional>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"

namespace kvstrata {
namespace {

uint64_t Sum(const std::vector<EvictedTier>& tiers, uint64_t EvictedTier::*what) {
  return std::accumulate(tiers.begin(), tiers.end(), uint64_t{0},
                         [what](uint64_t n, const EvictedTier& t) { return n + t.*what; });
}

void Count(const Page& page, EvictedTier* tier) {
  ++tier->pages;
  tier->bytes += page.bytes;
}

}  // namespace

uint64_t EvictResult::pages() const { return Sum(tiers, &EvictedTier::pages); }
uint64_t EvictResult::bytes() const { return Sum(tiers, &EvictedTier::bytes); }

EvictResult Eviction::Evict(bool dry_run) {
  StoreLock lock(books_.mu);
  EvictResult result;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    result.tiers.push_back({});
    result.tiers.back().tier = tier;
  }
  std::vector<Page*> victims;
  for (const PoolId pool : books_.memory.ids()) {
    EvictedTier& tier = result.tiers[static_cast<size_t>(pool.tier())];
    tier.pinned_bytes += books_.prefix.pinned_bytes(pool);
    for (Page* page = books_.prefix.oldest(pool); page != nullptr; page = page->newer) {
      Count(*page, &tier);
      tier.stored_pages += page->stored;
      victims.push_back(page);
    }
  }
  for (const Page* page : UnusedExtents()) {
    EvictedTier& tier = result.tiers[static_cast<size_t>(page->arena->tier)];
    Count(*page, &tier);
    ++tier.artefact_pages;
  }
  if (dry_run) return result;
  for (Page* page : victims) EvictPage(page);
  const auto may_go = [this](const Artefact& a) KVS_NO_THREAD_SAFETY_ANALYSIS { return MayGo(a); };
  while (std::optional<Artefact> a = books_.artefacts.EvictOldest(may_go))
    references_.ReleaseArtefact(std::move(*a));
  for (Tenant* tenant : catalog_.tenants()) references_.Advance(tenant);
  references_.ReclaimLocked();
  return result;
}

// From the newest on: what a session that ends has just left lies there.
void Eviction::DropUnusedPagesOf(const Model& model) {
  const auto of_model = [this, &model](const Artefact& a) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return MayGo(a) && !a.extents.empty() && a.extents.front().page->model == model.id;
  };
  while (std::optional<Artefact> a = books_.artefacts.EvictOldest(of_model))
    references_.ReleaseArtefact(std::move(*a));
  uint64_t left = model.pages;  // no more than these are to be found
  for (const PoolId pool : books_.memory.ids()) {
    for (Page* page = books_.prefix.newest(pool); page != nullptr && left != 0;) {
      Page* const other = std::exchange(page, page->older);
      if (other->model != model.id) continue;
      --left;
      books_.prefix.Erase(other);
      references_.Retire(other);
    }
  }
}

// Extents that artefacts alone refer to, and no pin keeps, once each.
std::set<const Page*> Eviction::UnusedExtents() const {
  std::set<const Page*> pages;
  for (const Artefact& artefact : books_.artefacts.all()) {
    if (books_.prefix.pinned().contains(artefact.key)) continue;
    for (const Extent& e : artefact.extents) {
      if (e.page->refs == e.page->artefacts) pages.insert(e.page);
    }
  }
  return pages;
}

// Only pages whose space the taker can use are worth dropping: those in its own arenas, and those
// of arenas that go back to the pool because nothing else is in them.
bool Eviction::EvictFor(const Taker& taker, PoolId pool, uint64_t bytes, bool only_own) {
  uint64_t expected = 0;
  std::vector<Page*> victims;
  std::set<const Arena*> emptied;
  Page* next = nullptr;
  for (Page* page = books_.prefix.oldest(pool); page != nullptr && expected < bytes; page = next) {
    const Arena& arena = *page->arena;
    const bool own = arena.writer == taker.writer && arena.tenant == taker.tenant->id;
    next = page->newer;
    if (only_own && arena.tenant != taker.tenant->id) continue;
    if (!own && (arena.live != 0 || catalog_.Fenced(arena) || emptied.contains(&arena))) continue;
    if (page->credits > 0) {
      next = books_.prefix.Spare(page);
      continue;
    }
    if (own) victims.push_back(page);
    if (!own) emptied.insert(&arena);
    expected += own ? page->bytes : arena.memory.bytes;
  }
  if (!emptied.empty()) {
    for (Page* page = books_.prefix.oldest(pool); page != nullptr; page = page->newer) {
      if (emptied.contains(page->arena)) victims.push_back(page);
    }
  }
  std::set<Tenant*> tenants;
  uint64_t used = 0;
  for (const auto& [id, arena] : books_.pools.arenas()) used += arena->extents.used();
  for (Page* page : victims) {
    tenants.insert(catalog_.tenant(page->arena->tenant));
    EvictPage(page);
  }
  for (Tenant* tenant : tenants) references_.Advance(tenant);
  references_.ReclaimLocked();
  uint64_t left = 0;
  for (const auto& [id, arena] : books_.pools.arenas()) left += arena->extents.used();
  return left < used;  // else readers hold what was dropped: dropping more helps nobody
}

void Eviction::EvictPage(Page* page) {
  ++books_.counters.evicted_pages;
  books_.counters.evicted_stored_pages += page->stored;
  books_.prefix.Erase(page);
  references_.Retire(page);
}

bool Eviction::MayGo(const Artefact& artefact) const {
  return artefact.unused() && !books_.prefix.pinned().contains(artefact.key);
}

bool Eviction::EvictArtefact(PoolId pool, const Tenant* tenant) {
  const auto idle = [this, pool, tenant](const Artefact& a) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const auto in_pool = [pool, tenant](const Extent& e) {
      const Arena& arena = *e.page->arena;
      return arena.pool == pool && (tenant == nullptr || arena.tenant == tenant->id);
    };
    return MayGo(a) && std::any_of(a.extents.begin(), a.extents.end(), in_pool);
  };
  std::optional<Artefact> oldest = books_.artefacts.EvictOldest(idle);
  if (!oldest) return false;
  references_.ReleaseArtefact(std::move(*oldest));
  return true;
}

}  // namespace kvstrata
