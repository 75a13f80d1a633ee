// What an operator drops, or would: everything that nobody uses and no pin keeps.
#include <numeric>
#include <optional>
#include <utility>

#include "server/store/store_impl.h"

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

EvictResult Store::Impl::Evict(bool dry_run) {
  MutexLock lock(mu_);
  EvictResult result;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    result.tiers.push_back({});
    result.tiers.back().tier = tier;
  }
  std::vector<Page*> victims;
  for (const PoolId pool : pools_.ids()) {
    EvictedTier& tier = result.tiers[static_cast<size_t>(pool.tier())];
    tier.pinned_bytes += prefix_.pinned_bytes(pool);
    for (Page* page = prefix_.oldest(pool); page != nullptr; page = page->newer) {
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
  while (std::optional<Artefact> a = artefacts_.EvictOldest(may_go)) DropArtefact(std::move(*a));
  for (Tenant* tenant : tenants_by_id_) Advance(tenant);
  ReclaimLocked();
  return result;
}

// From the newest on: what a session that ends has just left lies there.
void Store::Impl::DropUnusedPagesOf(const Model& model) {
  const auto of_model = [this, &model](const Artefact& a) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return MayGo(a) && !a.extents.empty() && a.extents.front().page->model == model.id;
  };
  while (std::optional<Artefact> a = artefacts_.EvictOldest(of_model)) DropArtefact(std::move(*a));
  uint64_t left = model.pages;  // no more than these are to be found
  for (const PoolId pool : pools_.ids()) {
    for (Page* page = prefix_.newest(pool); page != nullptr && left != 0;) {
      Page* const other = std::exchange(page, page->older);
      if (other->model != model.id) continue;
      --left;
      prefix_.Erase(other);
      Retire(other);
    }
  }
}

}  // namespace kvstrata
