// A pool whose device is lost (DEVICE_FAILED, a GPU's sticky error): it gives no memory any more,
// nobody finds what lies there, and who has pages there is told. Host and disk go on.
#include <algorithm>
#include <string>

#include "server/store/store_impl.h"

namespace kvstrata {

void Store::Impl::DropLost() {
  if (lost_dropped_ || pools_.failure(Tier::kDevice).ok()) return;
  lost_dropped_ = true;
  for (Page* page : prefix_.PagesIn(Tier::kDevice)) {
    prefix_.Erase(page);
    if (page->refs == 0) Retire(page);
  }
  const auto lies_there = [](const Artefact& a) {
    return std::ranges::any_of(
        a.extents, [](const Extent& e) { return e.page->arena->tier == Tier::kDevice; });
  };
  while (std::optional<Artefact> artefact = artefacts_.EvictOldest(lies_there)) {
    DropArtefact(std::move(*artefact));
  }
  for (Tenant* tenant : tenants_by_id_) Advance(tenant);
  ReclaimLocked();
}

void Store::Impl::LoseDevice(const Status& why) { pools_.Lose(Tier::kDevice, why); }

Status Store::Impl::CheckHeld(const Sequence& s) const {
  const Status failure = pools_.failure(Tier::kDevice);
  if (failure.ok()) return OkStatus();
  const auto lost = [](const Page* page) {
    return page != nullptr && page->arena->tier == Tier::kDevice;
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
