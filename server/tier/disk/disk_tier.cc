// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/disk_tier.h"

#include <utility>

#include "server/tier/disk/disk_tier_impl.h"
#include "server/tier/disk/tier_budget.h"

namespace kvstrata {

Result<std::unique_ptr<DiskTier>> DiskTier::Open(const DiskTierOptions& options,
                                                 Deadline deadline) {
  KVS_RETURN_IF_ERROR(Check(options));
  KVS_RETURN_IF_ERROR(CheckPlace(options));
  const uint64_t checkpoint = disk::CheckpointBytes(options.budget_bytes);
  KVS_ASSIGN_OR_RETURN(disk::TierDirectory directory,
                       disk::OpenTierDirectory(options.directory, disk::SegmentsOf(options),
                                               options.segment_bytes, checkpoint));
  IoQueueChoice reads = options.new_queue(options.depth);
  IoQueueChoice writes = options.new_queue(options.depth);
  auto impl =
      std::make_unique<Impl>(options, std::move(directory), std::move(reads), std::move(writes));
  KVS_RETURN_IF_ERROR(impl->files.AddAll());
  KVS_RETURN_IF_ERROR(disk::StartTier(&impl->state, &impl->files, &impl->checkpoints, deadline));
  return std::unique_ptr<DiskTier>(new DiskTier(std::move(impl)));
}

DiskTier::DiskTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DiskTier::~DiskTier() = default;

void DiskTier::Probe(std::span<TierProbe> probes) const { impl_->state.Probe(probes); }
Status DiskTier::Checkpoint(Deadline deadline) { return impl_->checkpoints.Write(deadline); }
bool DiskTier::Contains(std::string_view key) const { return !Sizes(key).empty(); }
std::vector<uint64_t> DiskTier::Sizes(std::string_view key) const {
  TierProbe probe{key, {}};
  impl_->state.Probe({&probe, 1});
  return {probe.sizes.all().begin(), probe.sizes.all().end()};
}
void DiskTier::ForEach(const std::function<void(const std::string& key,
                                                std::span<const uint64_t> sizes)>& visit) const {
  constexpr size_t kSlots = 4096;  // at a time
  for (uint64_t cursor = 0; cursor != kWalkEnd;) {
    for (const TierValue& value : impl_->state.Scan(&cursor, kSlots)) visit(value.key, value.sizes);
  }
}
std::vector<TierValue> DiskTier::Scan(uint64_t* cursor, size_t slots) const {
  return impl_->state.Scan(cursor, slots);
}
std::vector<std::string> DiskTier::Victims(std::span<const uint64_t> sizes) {
  return impl_->state.Victims(sizes);
}
void DiskTier::Pin(std::span<const std::string> keys) { impl_->state.Pin(keys); }
void DiskTier::Unpin(std::span<const std::string> keys) { impl_->state.Unpin(keys); }
Status DiskTier::AddMemory(std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline) {
  return impl_->files.AddMemory(std::move(memory), bytes, deadline);
}
DiskTierStats DiskTier::Stats() const {
  const disk::TierState& state = impl_->state;
  const disk::TierFiles& files = impl_->files;
  MutexLock lock(state.mu);
  DiskTierStats stats = state.stats;
  stats.direct = files.direct();
  stats.queue = files.queue_name();
  stats.degraded = files.degraded();
  stats.entries = state.index.size();
  stats.breaker_open = state.breaker.open();
  if (stats.breaker_open) {
    const auto pause = state.breaker.next_try() - std::chrono::steady_clock::now();
    stats.retry = std::max(std::chrono::microseconds(0),
                           std::chrono::duration_cast<std::chrono::microseconds>(pause));
  } else {
    stats.left_alone_since_us = 0;
  }
  stats.capacity_bytes = uint64_t{state.table.size()} * state.options.segment_bytes;
  for (uint32_t i = 0; i < state.table.size(); ++i) {
    const disk::Segment& segment = state.table.at(i);
    stats.used_bytes += uint64_t{segment.used} * segment.slot_blocks * disk::kBlockBytes;
    stats.stopped_segments += segment.stopped;
  }
  return stats;
}

}  // namespace kvstrata
