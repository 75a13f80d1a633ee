// A pool whose device is lost (DEVICE_FAILED, a GPU's sticky error): it gives no memory any more,
// nobody finds what lies there, and who has pages there is told. Host and disk go on.
#include <algorithm>
#include <string>

#include "server/store/store_impl.h"

namespace kvstrata {

void Store::Impl::DropLost() {
  for (const PoolId pool : pools_.ids()) DropLost(pool);
}

void Store::Impl::DropLost(PoolId pool) {
  bool& dropped = lost_dropped_[pool.index()];
  if (dropped || pools_.failure(pool).ok()) return;
  dropped = true;
  for (Page* page : prefix_.PagesIn(pool)) {
    prefix_.Erase(page);
    if (page->refs == 0) Retire(page);
  }
  const auto lies_there = [pool](const Artefact& a) {
    return std::ranges::any_of(a.extents,
                               [pool](const Extent& e) { return e.page->arena->pool == pool; });
  };
  while (std::optional<Artefact> artefact = artefacts_.EvictOldest(lies_there)) {
    DropArtefact(std::move(*artefact));
  }
  for (Tenant* tenant : tenants_by_id_) Advance(tenant);
  ReclaimLocked();
}

void Store::Impl::LoseDevice(uint32_t device, const Status& why) {
  pools_.Lose(PoolId::Device(device), why);
}

Status Store::Impl::CheckHeld(const Sequence& s) const {
  const PoolId device = PoolId::Device(sessions_.at(s.session)->device);
  const Status failure = pools_.failure(device);
  if (failure.ok()) return OkStatus();
  const auto lost = [device](const Page* page) {
    return page != nullptr && page->arena->pool == device;
  };
  const bool any =
      std::ranges::any_of(s.pages, lost) || std::ranges::any_of(s.index_blocks, lost) ||
      std::ranges::any_of(s.extents, [&lost](const Extent& e) { return lost(e.page); });
  if (!any) return OkStatus();
  return Unavailable("DEVICE_FAILED", "sequence " + std::to_string(s.id) +
                                          " has pages on a device that is lost (" +
                                          std::string(failure.message()) +
                                          "); close it and open it again: it is computed anew, in "
                                          "host memory");
}

}  // namespace kvstrata
