// Slots that hold nothing any more: their headers are overwritten before they are given out again.
#include <utility>

#include "server/tier/disk_tier_impl.h"
#include "server/tier/guard.h"

namespace kvstrata {

using disk::kBlockBytes;
using disk::SlotHeader;
using disk::Transfer;
using Op = IoRequest::Op;

Status DiskTier::Impl::Overwrite(std::vector<Condemned> slots, Deadline deadline) {
  std::set<uint32_t> segments;
  for (const Condemned& slot : slots) segments.insert(slot.at.segment);
  const Errors failed = MarkDirty(segments, deadline);
  Status first;
  const auto finish = [&](const Condemned& slot, int error) {
    Observe(error, slot.at.segment);
    if (error != 0 && first.ok()) first = disk::IoError(error);
    MutexLock lock(mu_);
    if (error == 0 && slot.reuse) table_.Free(slot.at);  // else it stays taken until the next start
  };
  size_t next = 0;
  const auto more = [&]() -> std::optional<Transfer> {
    while (next < slots.size()) {
      const Condemned& slot = slots[next++];
      if (const auto error = failed.find(slot.at.segment); error != failed.end()) {
        finish(slot, error->second);
        continue;
      }
      if (!Holds(Guard::kErasure)) {
        finish(slot, 0);
        continue;
      }
      const std::shared_ptr<std::byte> scratch = writer_.scratch.Take();
      KVS_CHECK(scratch != nullptr);
      MutexLock lock(mu_);
      const disk::Place place = PlaceOf(slot.at);
      disk::WriteHeader(place, disk::SlotState::kErased, ++generation_, "", {},
                        reinterpret_cast<SlotHeader*>(scratch.get()));
      const uint64_t offset = uint64_t{place.block} * kBlockBytes;
      return Transfer{{{Op::kWrite, FileOf(slot.at.segment), kBlockBytes, offset, scratch.get()}},
                      scratch,
                      [&finish, &slot](int error) { finish(slot, error); }};
    }
    return std::nullopt;
  };
  writer_.transfers.Run(more, deadline);
  if (first.reason() == "DISK_DEADLINE") ObserveDeadline();
  return first;
}

void DiskTier::Impl::OverwriteCondemned(Deadline deadline) {
  std::vector<Condemned> slots;
  {
    MutexLock lock(mu_);
    slots.swap(condemned_);
  }
  // An error is counted; those slots stay taken, and the next start judges them.
  (void)Overwrite(std::move(slots), deadline);
}

Status DiskTier::Impl::Erase(std::span<const std::string> keys, Deadline deadline) {
  const disk::HeldSide held_side(&writer_.lock, deadline);
  if (!held_side.held()) return disk::DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(MayAsk());
  OverwriteCondemned(deadline);
  std::vector<Condemned> slots;
  {
    MutexLock lock(mu_);
    for (const std::string& key : keys) {
      const auto it = index_.find(key);
      if (it != index_.end()) slots.push_back({Forget(it), true});
    }
  }
  return Overwrite(std::move(slots), deadline);
}

}  // namespace kvstrata
