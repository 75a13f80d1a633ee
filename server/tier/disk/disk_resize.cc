// SPDX-License-Identifier: Apache-2.0
// Another budget at run time: segments are added behind the others, or the last ones go.
#include <algorithm>
#include <string>

#include "server/tier/disk/tier_budget.h"

namespace kvstrata::disk {

Result<uint64_t> TierResize::Run(uint64_t budget_bytes, Deadline deadline) {
  DiskTierOptions options = state_->options;
  options.budget_bytes = budget_bytes;
  KVS_RETURN_IF_ERROR(DiskTier::Check(options));
  const HeldSide writes(&files_->writer().lock, deadline);
  const HeldSide reads(&files_->reader().lock, deadline);
  if (!writes.held() || !reads.held()) return DeadlineExceeded("another user");
  const uint64_t checkpoint = std::max(files_->checkpoint_bytes(), CheckpointBytes(budget_bytes));
  if (budget_bytes < state_->options.segment_bytes + 2 * checkpoint) {
    return InvalidArgument(
        "DISK_BUDGET", "disk.budget_bytes = " + std::to_string(budget_bytes) + "; the least is " +
                           std::to_string(state_->options.segment_bytes + 2 * checkpoint) +
                           ", a segment and the checkpoints' files, which "
                           "never shrink");
  }
  const auto wanted =
      static_cast<uint32_t>((budget_bytes - 2 * checkpoint) / state_->options.segment_bytes);
  uint32_t is = 0;
  {
    MutexLock lock(state_->mu);
    is = state_->table.size();
  }
  if (wanted < is) return Shrink(wanted);
  KVS_RETURN_IF_ERROR(CheckSpace(options));
  KVS_RETURN_IF_ERROR(Grow(is, wanted, checkpoint));
  return uint64_t{0};
}

Status TierResize::Grow(uint32_t from, uint32_t to, uint64_t checkpoint_bytes) {
  KVS_RETURN_IF_ERROR(files_->Grow(from, to, checkpoint_bytes));
  MutexLock lock(state_->mu);
  state_->table.Grow(to);
  for (uint32_t i = from; i < to; ++i) state_->table.at(i).flushed = state_->generation;
  return OkStatus();
}

Result<uint64_t> TierResize::Shrink(uint32_t segments) {
  uint64_t forgotten = 0;
  {
    MutexLock lock(state_->mu);
    uint64_t pinned = 0;
    for (uint32_t i = segments; i < state_->table.size(); ++i) {
      for (const std::string* key : state_->table.at(i).keys) {
        pinned += key != nullptr && state_->pinned.contains(*key);
      }
    }
    if (pinned != 0) {
      return FailedPrecondition("RESIZE_PINNED", std::to_string(pinned) +
                                                     " pinned values lie in the files that would "
                                                     "go; unpin them, or give up fewer bytes");
    }
    for (uint32_t i = segments; i < state_->table.size(); ++i) {
      const std::vector<const std::string*> keys = state_->table.at(i).keys;
      for (const std::string* key : keys) {
        if (key == nullptr) continue;
        state_->Forget(state_->index.find(*key));
        ++forgotten;
      }
    }
    std::erase_if(state_->condemned,
                  [segments](const Condemned& c) { return c.at.segment >= segments; });
    state_->table.Shrink(segments);
  }
  files_->Shrink(segments);
  return forgotten;
}

}  // namespace kvstrata::disk
