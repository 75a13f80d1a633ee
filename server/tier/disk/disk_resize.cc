// SPDX-License-Identifier: Apache-2.0
// Another budget at run time: segments are added behind the others, or the last ones go.
#include <algorithm>
#include <string>

#include "server/tier/disk/disk_tier_impl.h"
#include "server/tier/disk/tier_budget.h"

namespace kvstrata {
namespace disk {
namespace {

Status Grow(TierState* state, TierFiles* files, uint32_t from, uint32_t to,
            uint64_t checkpoint_bytes) {
  KVS_RETURN_IF_ERROR(files->Grow(from, to, checkpoint_bytes));
  MutexLock lock(state->mu);
  state->table.Grow(to);
  for (uint32_t i = from; i < to; ++i) state->table.at(i).flushed = state->generation;
  return OkStatus();
}

// Forgets the values of segments from `segments` on; how many.
Result<uint64_t> Shrink(TierState* state, TierFiles* files, uint32_t segments) {
  uint64_t forgotten = 0;
  {
    MutexLock lock(state->mu);
    uint64_t pinned = 0;
    for (uint32_t i = segments; i < state->table.size(); ++i) {
      for (const std::string* key : state->table.at(i).keys) {
        pinned += key != nullptr && state->pinned.contains(*key);
      }
    }
    if (pinned != 0) {
      return FailedPrecondition("RESIZE_PINNED", std::to_string(pinned) +
                                                     " pinned values lie in the files that would "
                                                     "go; unpin them, or give up fewer bytes");
    }
    for (uint32_t i = segments; i < state->table.size(); ++i) {
      const std::vector<const std::string*> keys = state->table.at(i).keys;
      for (const std::string* key : keys) {
        if (key == nullptr) continue;
        state->Forget(state->index.find(*key));
        ++forgotten;
      }
    }
    std::erase_if(state->condemned,
                  [segments](const Condemned& c) { return c.at.segment >= segments; });
    state->table.Shrink(segments);
  }
  files->Shrink(segments);
  return forgotten;
}

}  // namespace
}  // namespace disk

Result<uint64_t> DiskTier::Resize(uint64_t budget_bytes, Deadline deadline) {
  disk::TierState& state = impl_->state;
  disk::TierFiles& files = impl_->files;
  DiskTierOptions options = state.options;
  options.budget_bytes = budget_bytes;
  KVS_RETURN_IF_ERROR(Check(options));
  const disk::HeldSide writes(&files.writer().lock, deadline);
  const disk::HeldSide reads(&files.reader().lock, deadline);
  if (!writes.held() || !reads.held()) return disk::DeadlineExceeded("another user");
  const uint64_t checkpoint =
      std::max(files.checkpoint_bytes(), disk::CheckpointBytes(budget_bytes));
  if (budget_bytes < state.options.segment_bytes + 2 * checkpoint) {
    return InvalidArgument(
        "DISK_BUDGET", "disk.budget_bytes = " + std::to_string(budget_bytes) + "; the least is " +
                           std::to_string(state.options.segment_bytes + 2 * checkpoint) +
                           ", a segment and the checkpoints' files, which "
                           "never shrink");
  }
  const auto wanted =
      static_cast<uint32_t>((budget_bytes - 2 * checkpoint) / state.options.segment_bytes);
  uint32_t is = 0;
  {
    MutexLock lock(state.mu);
    is = state.table.size();
  }
  if (wanted < is) return disk::Shrink(&state, &files, wanted);
  KVS_RETURN_IF_ERROR(disk::CheckSpace(options));
  KVS_RETURN_IF_ERROR(disk::Grow(&state, &files, is, wanted, checkpoint));
  return uint64_t{0};
}

}  // namespace kvstrata
