// SPDX-License-Identifier: Apache-2.0
// TierStart: one start of a disk tier: whose segments these are, and the index from checkpoint and
// slots. Nobody else uses the tier meanwhile.
#ifndef KVSTRATA_SERVER_TIER_DISK_TIER_START_H_
#define KVSTRATA_SERVER_TIER_DISK_TIER_START_H_

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "base/status.h"
#include "server/tier/disk/checkpoint_files.h"
#include "server/tier/disk/state/tier_files.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

class TierStart {
 public:
  TierStart(TierState* state, TierFiles* files, CheckpointFiles* checkpoints)
      : state_(state), files_(files), checkpoints_(checkpoints) {}

  // Those of CheckGeometry; DEADLINE_EXCEEDED DISK_DEADLINE.
  Status Run(Deadline deadline);

 private:
  struct Superblocks {  // what a segment's first blocks say
    Superblock newest{};
    bool valid = false;
    bool both = false;
  };

  Status ReadSuperblocks(std::vector<Superblocks>* all, Deadline deadline);
  Status ChooseStore(std::span<const Superblocks> all);
  void AdoptSegments(std::span<const Superblocks> all);
  Status ScanSegments(const std::set<uint32_t>& segments, std::vector<NamedEntry>* found,
                      Deadline deadline);
  void EnterFound(NamedEntry found) KVS_EXCLUDES(state_->mu);
  void FreeUnheld() KVS_EXCLUDES(state_->mu);

  TierState* const state_;
  TierFiles* const files_;
  CheckpointFiles* const checkpoints_;
  std::set<SlotId> unreadable_;
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_DISK_TIER_START_H_
