// SPDX-License-Identifier: Apache-2.0
// What a budget of a disk tier comes to: how many segments, whether its file system has room for
// them, and another budget at run time.
#ifndef KVSTRATA_SERVER_TIER_DISK_TIER_BUDGET_H_
#define KVSTRATA_SERVER_TIER_DISK_TIER_BUDGET_H_

#include <cstdint>

#include "base/status.h"
#include "server/tier/disk/disk_tier.h"
#include "server/tier/disk/format/format.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

// OK, or FAILED_PRECONDITION DISK_VERSION, DISK_SEGMENT_BYTES. REQUIRES: the block is whole.
Status CheckGeometry(const Superblock& block, const DiskTierOptions& options);
// REQUIRES of both, DiskTier::Check of the options is OK.
uint32_t SegmentsOf(const DiskTierOptions& options);
// Whether the file system has room for what is missing of the budget's files, and keeps some for
// others (a twentieth of it, at most 1 GiB). OK, or RESOURCE_EXHAUSTED DISK_SPACE.
Status CheckSpace(const DiskTierOptions& options);

// Segments are added behind the others, or the last ones go.
class TierResize {
 public:
  TierResize(TierState* state, TierFiles* files) : state_(state), files_(files) {}

  // DiskTier::Resize. Holds both sides.
  Result<uint64_t> Run(uint64_t budget_bytes, Deadline deadline) KVS_EXCLUDES(state_->mu);

 private:
  Status Grow(uint32_t from, uint32_t to, uint64_t checkpoint_bytes) KVS_EXCLUDES(state_->mu);
  // Forgets the values of segments from `segments` on; how many.
  Result<uint64_t> Shrink(uint32_t segments) KVS_EXCLUDES(state_->mu);

  TierState* const state_;
  TierFiles* const files_;
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_DISK_TIER_BUDGET_H_
