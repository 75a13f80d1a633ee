// SPDX-License-Identifier: Apache-2.0
// A budget against the room of its file system. Files are reserved whole, so a budget beyond it
// would leave nothing to anybody else there.
#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>

#include "server/tier/disk/files/tier_place.h"
#include "server/tier/disk/tier_budget.h"

namespace kvstrata {
namespace {

constexpr uint64_t kMostKept = uint64_t{1} << 30;
constexpr uint64_t kKeptShare = 20;  // one in so many bytes of the file system

struct Need {
  uint64_t held = 0;     // bytes of the files that are there, as far as this budget uses them
  uint64_t missing = 0;  // that a start or a resize would reserve
};

// `place` null: there is no folder yet.
Need NeedOf(const DiskTierOptions& options, const disk::TierPlace* place) {
  Need need;
  const auto add = [&](const std::string& name, uint64_t bytes) {
    const uint64_t has = place == nullptr ? 0 : std::min(place->SizeOf(name), bytes);
    need.held += has;
    need.missing += bytes - has;
  };
  for (uint32_t i = 0; i < 2; ++i) {
    add(disk::CheckpointName(i), disk::CheckpointBytes(options.budget_bytes));
  }
  for (uint32_t i = 0; i < disk::SegmentsOf(options); ++i) {
    add(disk::SegmentName(i), options.segment_bytes);
  }
  return need;
}

std::string MiB(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

uint32_t disk::SegmentsOf(const DiskTierOptions& options) {
  const uint64_t checkpoints = 2 * disk::CheckpointBytes(options.budget_bytes);
  return static_cast<uint32_t>((options.budget_bytes - checkpoints) / options.segment_bytes);
}

Status disk::CheckSpace(const DiskTierOptions& options) {
  const Result<disk::TierPlace> place = disk::TierPlace::OpenExisting(options.directory);
  std::filesystem::path folder = options.directory;
  if (!folder.has_filename()) folder = folder.parent_path();  // "/a/b/" is "/a/b"
  if (!place.ok()) folder = folder.parent_path();
  struct statvfs fs {};
  // A file system that does not tell its size (0) is asked file by file.
  if (statvfs(folder.c_str(), &fs) != 0 || fs.f_blocks == 0) return OkStatus();
  const uint64_t free = uint64_t{fs.f_bavail} * fs.f_frsize;
  const uint64_t kept = std::min(uint64_t{fs.f_blocks} * fs.f_frsize / kKeptShare, kMostKept);
  const uint64_t room = free - std::min(free, kept);
  const Need need = NeedOf(options, place.ok() ? &*place : nullptr);
  if (need.missing <= room) return OkStatus();
  return ResourceExhausted("DISK_SPACE",
                           "disk.budget_bytes = " + std::to_string(options.budget_bytes) + " (" +
                               MiB(options.budget_bytes) + ") needs " + MiB(need.missing) +
                               " more than its files have (" + MiB(need.held) + "); " + MiB(free) +
                               " are free at '" + folder.string() + "', of which " + MiB(kept) +
                               " are left to others; lower it to " + MiB(need.held + room) +
                               " or less, free some, or choose another disk.path");
}

}  // namespace kvstrata
