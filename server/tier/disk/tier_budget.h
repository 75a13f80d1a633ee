// SPDX-License-Identifier: Apache-2.0
// What a budget of a disk tier comes to: how many segments, and whether its file system has room
// for them.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "server/tier/disk/format/format.h"
#include "server/tier/disk/state/disk_options.h"

namespace kvstrata::disk {

// OK, or FAILED_PRECONDITION DISK_VERSION, DISK_SEGMENT_BYTES. REQUIRES: the block is whole.
Status CheckGeometry(const Superblock& block, const DiskTierOptions& options);
// REQUIRES of both, DiskTier::Check of the options is OK.
uint32_t SegmentsOf(const DiskTierOptions& options);
// Whether the file system has room for what is missing of the budget's files, and keeps some for
// others (a twentieth of it, at most 1 GiB). OK, or RESOURCE_EXHAUSTED DISK_SPACE.
Status CheckSpace(const DiskTierOptions& options);

}  // namespace kvstrata::disk
