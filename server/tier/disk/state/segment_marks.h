// SPDX-License-Identifier: Apache-2.0
// SegmentMarks: what the next start may believe of a segment. Its dirty mark is written before
// anything else is, and a flush covers all that was put and erased before it. The writer's side is
// held.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/status.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

class SegmentMarks {
 public:
  using Errors = std::map<uint32_t, IoOutcome>;  // by segment

  SegmentMarks(TierState* state, TierFiles* files) : state_(state), files_(files) {}

  // Errors of the segments that could not be marked.
  Errors MarkDirty(const std::set<uint32_t>& segments, Deadline deadline) KVS_EXCLUDES(state_->mu);
  // DATA_LOSS DISK_FLUSH, as DiskTier::Flush.
  Status FlushWritten(Deadline deadline) KVS_EXCLUDES(state_->mu);

 private:
  Transfer MarkTransfer(uint32_t segment, Errors* failed) KVS_EXCLUDES(state_->mu);
  void LoseUnflushed(uint32_t segment) KVS_REQUIRES(state_->mu);

  TierState* const state_;
  TierFiles* const files_;
};

// SlotErasure: slots that hold nothing any more. Their headers are overwritten before they are
// given out again, so that no start finds what was erased. The writer's side is held.
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
