// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/state/slot_erasure.h"

#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "server/tier/guard.h"

namespace kvstrata::disk {

using Op = IoRequest::Op;

Status SlotErasure::Overwrite(std::vector<Condemned> slots, Deadline deadline) {
  std::set<uint32_t> segments;
  for (const Condemned& slot : slots) segments.insert(slot.at.segment);
  const SegmentMarks::Errors failed = marks_->MarkDirty(segments, deadline);
  Status first;
  const auto finish = [&](const Condemned& slot, const IoOutcome& outcome) {
    const int error = outcome.error;
    state_->Observe(outcome, slot.at.segment);
    if (error != 0 && first.ok()) first = IoError(outcome, SegmentName(slot.at.segment));
    MutexLock lock(state_->mu);
    // Else it stays taken until the next start.
    if (error == 0 && slot.reuse) state_->table.Free(slot.at);
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
        finish(slot, {});
        continue;
      }
      const std::shared_ptr<std::byte> scratch = files_->writer().scratch.Take();
      KVS_CHECK(scratch != nullptr);
      MutexLock lock(state_->mu);
      const Place place = state_->PlaceOf(slot.at);
      WriteHeader(place, SlotState::kErased, ++state_->generation, "", {},
                  reinterpret_cast<SlotHeader*>(scratch.get()));
      const uint64_t offset = uint64_t{place.block} * kBlockBytes;
      return Transfer{
          {{Op::kWrite, files_->FileOf(slot.at.segment), kBlockBytes, offset, scratch.get()}},
          scratch,
          [&finish, &slot](const IoOutcome& outcome) { finish(slot, outcome); }};
    }
    return std::nullopt;
  };
  files_->writer().transfers.Run(more, deadline);
  if (first.reason() == "DISK_DEADLINE") state_->ObserveDeadline();
  return first;
}

void SlotErasure::OverwriteCondemned(Deadline deadline) {
  std::vector<Condemned> slots;
  {
    MutexLock lock(state_->mu);
    slots.swap(state_->condemned);
  }
  // An error is counted; those slots stay taken, and the next start judges them.
  (void)Overwrite(std::move(slots), deadline);
}

}  // namespace kvstrata::disk
