// SPDX-License-Identifier: Apache-2.0
// CheckpointFiles: the index on disk, written to two files alternately, read at the start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "server/tier/disk/format/checkpoint.h"
#include "server/tier/disk/state/segment_marks.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

class CheckpointFiles {
 public:
  struct Covered {
    std::vector<NamedEntry> entries;
    uint64_t sequence = 0;
  };

  CheckpointFiles(TierState* state, TierFiles* files, SegmentMarks* marks, SlotErasure* erasure)
      : state_(state), files_(files), marks_(marks), erasure_(erasure) {}

  // DiskTier::Checkpoint. Holds the writer's side.
  Status Write(Deadline deadline) KVS_EXCLUDES(state_->mu);
  // Entries of the newest checkpoint that is whole; raises the state's sequence of checkpoints and
  // its generation. At the start.
  std::optional<Covered> Load(Deadline deadline) KVS_EXCLUDES(state_->mu);

 private:
  std::vector<std::byte> EncodeEntries(CheckpointHeader* header) KVS_EXCLUDES(state_->mu);
  std::optional<std::vector<NamedEntry>> LoadEntries(uint32_t which, const CheckpointHeader& header,
                                                     Deadline deadline);
  bool Plausible(std::span<const NamedEntry> entries) const;

  TierState* const state_;
  TierFiles* const files_;
  SegmentMarks* const marks_;
  SlotErasure* const erasure_;
};

}  // namespace kvstrata::disk
