// SPDX-License-Identifier: Apache-2.0
// What keeps a disk tier from opening, told without changing anything: `kvstratad --check-config`
// and the start agree.
#include <optional>
#include <utility>

#include "server/tier/disk/disk_tier.h"
#include "server/tier/disk/files/tier_place.h"
#include "server/tier/disk/tier_budget.h"

namespace kvstrata {

using disk::kBlockBytes;
using disk::Seen;
using disk::Superblock;

namespace {

// A segment and the two checkpoints, whose size grows with the budget.
uint64_t LeastBudget(uint64_t segment_bytes) {
  uint64_t budget = segment_bytes;
  for (uint64_t next = 0; next != budget;) {
    next = std::exchange(budget, segment_bytes + 2 * disk::CheckpointBytes(budget));
  }
  return budget;
}

// The first of its two copies that is whole; nothing if neither is.
std::optional<Superblock> ReadSuperblock(int fd, uint32_t segment) {
  for (uint32_t copy = 0; copy < 2; ++copy) {
    Superblock block;
    if (pread(fd, &block, sizeof(block), copy * kBlockBytes) != sizeof(block)) continue;
    if (disk::Look(block) != Seen::kDamaged && block.segment == segment) return block;
  }
  return std::nullopt;
}

// Checks the first segment that says whose it is.
Status CheckOwner(const DiskTierOptions& options) {
  const Result<disk::TierPlace> place = disk::TierPlace::OpenExisting(options.directory);
  if (!place.ok()) return OkStatus();  // it is not there yet
  for (uint32_t i = 0; i < kIoFiles; ++i) {
    KVS_ASSIGN_OR_RETURN(const UniqueFd fd, place->OpenToRead(disk::SegmentName(i)));
    if (!fd) return OkStatus();
    if (const auto block = ReadSuperblock(fd.get(), i)) return disk::CheckGeometry(*block, options);
  }
  return OkStatus();
}

}  // namespace

Status disk::CheckGeometry(const Superblock& block, const DiskTierOptions& options) {
  if (disk::Look(block) == Seen::kForeign) {
    return FailedPrecondition("DISK_VERSION",
                              "disk.path = '" + options.directory + "' is of format version " +
                                  std::to_string(block.version) + ", this kvstrata knows " +
                                  std::to_string(disk::kVersion) + "; choose another disk.path");
  }
  if (block.segment_bytes != options.segment_bytes) {
    return FailedPrecondition("DISK_SEGMENT_BYTES",
                              "disk.segment_bytes = " + std::to_string(options.segment_bytes) +
                                  ", but the segments in disk.path = '" + options.directory +
                                  "' have " + std::to_string(block.segment_bytes) +
                                  " bytes; configure that, or choose another disk.path");
  }
  return OkStatus();
}

Status DiskTier::Check(const DiskTierOptions& options) {
  if (options.segment_bytes % kBlockBytes != 0 || options.segment_bytes < 16 * kBlockBytes ||
      options.segment_bytes > (4ull << 30)) {
    return InvalidArgument("DISK_SEGMENT_BYTES",
                           "disk.segment_bytes = " + std::to_string(options.segment_bytes) +
                               "; it must be a multiple of 4096 from 64 KiB to 4 GiB");
  }
  const std::string given = "disk.budget_bytes = " + std::to_string(options.budget_bytes) +
                            ", disk.segment_bytes = " + std::to_string(options.segment_bytes);
  if (const uint64_t least = LeastBudget(options.segment_bytes); options.budget_bytes < least) {
    return InvalidArgument("DISK_BUDGET", given +
                                              ": a budget for one segment and two checkpoints is "
                                              "at least " +
                                              std::to_string(least) +
                                              "; raise it, or lower disk.segment_bytes");
  }
  if (options.budget_bytes / options.segment_bytes > kIoFiles - 2) {
    return InvalidArgument("DISK_BUDGET", given + ": a budget is at most " +
                                              std::to_string(kIoFiles - 2) +
                                              " segments; lower it, or raise disk.segment_bytes");
  }
  return OkStatus();
}

Status DiskTier::CheckPlace(const DiskTierOptions& options) {
  KVS_RETURN_IF_ERROR(disk::TierPlace::Check(options.directory));
  KVS_RETURN_IF_ERROR(CheckOwner(options));
  if (!Check(options).ok()) return OkStatus();  // told by the configuration
  return disk::CheckSpace(options);
}

}  // namespace kvstrata
