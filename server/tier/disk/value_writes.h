// SPDX-License-Identifier: Apache-2.0
// ValueWrites: what callers write: values put and erased, and made durable. Each call holds the
// writer's side, and first overwrites the slots that were condemned since the last one.
#ifndef KVSTRATA_SERVER_TIER_DISK_VALUE_WRITES_H_
#define KVSTRATA_SERVER_TIER_DISK_VALUE_WRITES_H_

#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/tier/disk/state/segment_marks.h"
#include "server/tier/disk/state/slot_erasure.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

class ValueWrites {
 public:
  ValueWrites(TierState* state, TierFiles* files, SegmentMarks* marks, SlotErasure* erasure)
      : state_(state), files_(files), marks_(marks), erasure_(erasure) {}

  // Those of DiskTier.
  void Put(std::span<TierPut> requests, Deadline deadline, const std::stop_token& cancel)
      KVS_EXCLUDES(state_->mu);
  Status Erase(std::span<const std::string> keys, Deadline deadline) KVS_EXCLUDES(state_->mu);
  Status Flush(Deadline deadline) KVS_EXCLUDES(state_->mu);

 private:
  // A value that has a slot and is not yet in the index.
  struct PlannedPut {
    TierPut* request = nullptr;
    SlotId at;
    Place place;
    uint64_t generation = 0;
  };

  Status CheckPut(const TierPut& request) const;
  std::vector<PlannedPut> PlanPuts(std::span<TierPut> requests) KVS_EXCLUDES(state_->mu);
  Transfer TransferOf(const PlannedPut& put) KVS_EXCLUDES(state_->mu);
  void FinishPut(const PlannedPut& put, const IoOutcome& outcome) KVS_EXCLUDES(state_->mu);

  TierState* const state_;
  TierFiles* const files_;
  SegmentMarks* const marks_;
  SlotErasure* const erasure_;
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_DISK_VALUE_WRITES_H_
