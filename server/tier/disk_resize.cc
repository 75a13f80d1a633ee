// Another budget at run time: segments are added behind the others, or the last ones go.
#include <algorithm>
#include <string>

#include "server/tier/disk_tier_impl.h"

namespace kvstrata {

Result<uint64_t> DiskTier::Impl::Resize(uint64_t budget_bytes, Deadline deadline) {
  DiskTierOptions options = options_;
  options.budget_bytes = budget_bytes;
  KVS_RETURN_IF_ERROR(Check(options));
  const disk::HeldSide writes(&writer_.lock, deadline);
  const disk::HeldSide reads(&reader_.lock, deadline);
  if (!writes.held() || !reads.held()) return disk::DeadlineExceeded("another user");
  const uint64_t checkpoint = std::max(checkpoint_bytes_, disk::CheckpointBytes(budget_bytes));
  if (budget_bytes < options_.segment_bytes + 2 * checkpoint) {
    return InvalidArgument(
        "DISK_BUDGET", "disk.budget_bytes = " + std::to_string(budget_bytes) + "; the least is " +
                           std::to_string(options_.segment_bytes + 2 * checkpoint) +
                           ", a segment and the checkpoints' files, which "
                           "never shrink");
  }
  const auto wanted =
      static_cast<uint32_t>((budget_bytes - 2 * checkpoint) / options_.segment_bytes);
  uint32_t is = 0;
  {
    MutexLock lock(mu_);
    is = table_.size();
  }
  if (wanted < is) return Shrink(wanted);
  KVS_RETURN_IF_ERROR(disk::CheckSpace(options));
  KVS_RETURN_IF_ERROR(Grow(is, wanted, checkpoint));
  return uint64_t{0};
}

Status DiskTier::Impl::Grow(uint32_t from, uint32_t to, uint64_t checkpoint_bytes) {
  KVS_RETURN_IF_ERROR(
      disk::GrowTierDirectory(from, to, options_.segment_bytes, checkpoint_bytes, &directory_));
  checkpoint_bytes_ = checkpoint_bytes;
  if (const Status added = AddNewFiles(); !added.ok()) {
    disk::ShrinkTierDirectory(from, &directory_);
    return added;
  }
  MutexLock lock(mu_);
  table_.Grow(to);
  for (uint32_t i = from; i < to; ++i) table_.at(i).flushed = generation_;
  return OkStatus();
}

Status DiskTier::Impl::AddNewFiles() {
  for (; added_ < directory_.segments.size(); ++added_) {
    for (disk::Side* side : {&reader_, &writer_}) {
      const int fd = directory_.segments[added_].get();
      KVS_ASSIGN_OR_RETURN(const uint32_t file, side->transfers.queue().AddFile(fd));
      if (file != FileOf(static_cast<uint32_t>(added_))) {
        return Internal("IO_FILES", "one queue refused a file before: restart to grow");
      }
    }
  }
  return OkStatus();
}

Result<uint64_t> DiskTier::Impl::Shrink(uint32_t segments) {
  uint64_t forgotten = 0;
  {
    MutexLock lock(mu_);
    uint64_t pinned = 0;
    for (uint32_t i = segments; i < table_.size(); ++i) {
      for (const std::string* key : table_.at(i).keys) {
        pinned += key != nullptr && pinned_.contains(*key);
      }
    }
    if (pinned != 0) {
      return FailedPrecondition("RESIZE_PINNED", std::to_string(pinned) +
                                                     " pinned values lie in the files that would "
                                                     "go; unpin them, or give up fewer bytes");
    }
    for (uint32_t i = segments; i < table_.size(); ++i) {
      const std::vector<const std::string*> keys = table_.at(i).keys;
      for (const std::string* key : keys) {
        if (key == nullptr) continue;
        Forget(index_.find(*key));
        ++forgotten;
      }
    }
    std::erase_if(condemned_, [segments](const Condemned& c) { return c.at.segment >= segments; });
    table_.Shrink(segments);
  }
  disk::ShrinkTierDirectory(segments, &directory_);
  return forgotten;
}

}  // namespace kvstrata
