// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/state/tier_files.h"

#include <utility>

namespace kvstrata::disk {

TierFiles::TierFiles(TierState* state, TierDirectory directory, IoQueueChoice reads,
                     IoQueueChoice writes)
    : state_(state),
      directory_(std::move(directory)),
      first_segments_(static_cast<uint32_t>(directory_.segments.size())),
      checkpoint_bytes_(CheckpointBytes(state->options.budget_bytes)),
      queue_name_(reads.queue->name()),
      degraded_(directory_.degraded.ok() ? reads.degraded : directory_.degraded),
      reader_(std::move(reads.queue), state->options.depth),
      writer_(std::move(writes.queue), state->options.depth) {}

// Segment i is file i of both queues, the checkpoints follow.
Status TierFiles::AddAll() {
  for (Side* side : {&reader_, &writer_}) {
    IoQueue& queue = side->transfers.queue();
    for (const UniqueFd& fd : directory_.segments) {
      KVS_RETURN_IF_ERROR(queue.AddFile(fd.get()).status());
    }
    for (const UniqueFd& fd : directory_.checkpoints) {
      KVS_RETURN_IF_ERROR(queue.AddFile(fd.get()).status());
    }
  }
  added_ = directory_.segments.size();
  return OkStatus();
}

Status TierFiles::Grow(uint32_t from, uint32_t to, uint64_t checkpoint_bytes) {
  KVS_RETURN_IF_ERROR(
      GrowTierDirectory(from, to, state_->options.segment_bytes, checkpoint_bytes, &directory_));
  checkpoint_bytes_ = checkpoint_bytes;
  const Status added = AddNew();
  if (!added.ok()) Shrink(from);
  return added;
}

Status TierFiles::AddNew() {
  for (; added_ < directory_.segments.size(); ++added_) {
    for (Side* side : {&reader_, &writer_}) {
      const int fd = directory_.segments[added_].get();
      KVS_ASSIGN_OR_RETURN(const uint32_t file, side->transfers.queue().AddFile(fd));
      if (file != FileOf(static_cast<uint32_t>(added_))) {
        return Internal("IO_FILES", "one queue refused a file before: restart to grow");
      }
    }
  }
  return OkStatus();
}

size_t TierFiles::CutLonger() {
  CutLongerSegments(state_->options.segment_bytes, &directory_);
  return directory_.longer.size();
}

Status TierFiles::AddMemory(std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline) {
  {
    MutexLock lock(state_->mu);
    memory_.push_back(memory);
  }
  for (Side* side : {&reader_, &writer_}) {
    const HeldSide held_side(&side->lock, deadline);
    if (!held_side.held()) return DeadlineExceeded("another user");
    side->transfers.queue().AddMemory(memory.get(), bytes);
  }
  return OkStatus();
}

}  // namespace kvstrata::disk
