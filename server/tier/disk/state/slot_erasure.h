// SPDX-License-Identifier: Apache-2.0
// SlotErasure: slots that hold nothing any more. Their headers are overwritten before they are
// given out again, so that no start finds what was erased. The writer's side is held.
#ifndef KVSTRATA_SERVER_TIER_DISK_STATE_SLOT_ERASURE_H_
#define KVSTRATA_SERVER_TIER_DISK_STATE_SLOT_ERASURE_H_

#include <vector>

#include "base/status.h"
#include "server/tier/disk/state/segment_marks.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

class SlotErasure {
 public:
  SlotErasure(TierState* state, TierFiles* files, SegmentMarks* marks)
      : state_(state), files_(files), marks_(marks) {}

  // Overwrites the headers of slots that hold nothing, and frees them. The first error.
  Status Overwrite(std::vector<Condemned> slots, Deadline deadline) KVS_EXCLUDES(state_->mu);
  void OverwriteCondemned(Deadline deadline) KVS_EXCLUDES(state_->mu);

 private:
  TierState* const state_;
  TierFiles* const files_;
  SegmentMarks* const marks_;
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_DISK_STATE_SLOT_ERASURE_H_
