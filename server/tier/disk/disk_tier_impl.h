// SPDX-License-Identifier: Apache-2.0
// DiskTier::Impl: the parts of the engine, one of each, in the order in which they are made. Put,
// Erase and Flush are in value_writes.cc, Get in value_reads.cc, Resize in disk_resize.cc.
#pragma once

#include <cstdint>
#include <utility>

#include "server/tier/disk/checkpoint_files.h"
#include "server/tier/disk/disk_tier.h"
#include "server/tier/disk/state/segment_marks.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata {

struct DiskTier::Impl {
  Impl(const DiskTierOptions& options, disk::TierDirectory directory, IoQueueChoice for_reads,
       IoQueueChoice for_writes)
      : state(options, static_cast<uint32_t>(directory.segments.size())),
        files(&state, std::move(directory), std::move(for_reads), std::move(for_writes)) {}

  disk::TierState state;
  disk::TierFiles files;
  disk::SegmentMarks marks{&state, &files};
  disk::SlotErasure erasure{&state, &files, &marks};
  disk::CheckpointFiles checkpoints{&state, &files, &marks, &erasure};
};

namespace disk {

// tier_start.cc. Those of CheckGeometry; DEADLINE_EXCEEDED DISK_DEADLINE.
Status StartTier(TierState* state, TierFiles* files, CheckpointFiles* checkpoints,
                 Deadline deadline);

}  // namespace disk
}  // namespace kvstrata
