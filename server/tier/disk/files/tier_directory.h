// SPDX-License-Identifier: Apache-2.0
// TierDirectory: the files of a disk tier, locked, preallocated and open.
//
// O_DIRECT where the file system has it. What a full disk has no room for is left out and said.
// Cost: blocks; one fallocate for each new file.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "server/tier/disk/files/tier_place.h"

namespace kvstrata::disk {

struct TierDirectory {
  TierPlace place;
  UniqueFd lock;
  std::array<UniqueFd, 2> checkpoints;
  std::vector<UniqueFd> segments;
  bool direct = true;
  Status degraded;               // RESOURCE_EXHAUSTED DISK_SPACE: fewer segments than asked for
  std::vector<uint32_t> longer;  // segments whose files have more bytes than they should
};

// Segments of a number beyond `segments` are deleted. Those of TierPlace; FAILED_PRECONDITION
// DISK_LOCKED: another daemon has it; RESOURCE_EXHAUSTED DISK_SPACE: no room for the first one.
Result<TierDirectory> OpenTierDirectory(const std::string& path, uint32_t segments,
                                        uint64_t segment_bytes, uint64_t checkpoint_bytes);

// Reserves segments `from` .. `to` and checkpoints of that size. All or nothing: RESOURCE_EXHAUSTED
// DISK_SPACE, and those of TierPlace.
Status GrowTierDirectory(uint32_t from, uint32_t to, uint64_t segment_bytes,
                         uint64_t checkpoint_bytes, TierDirectory* dir);
// Releases what the files of `longer` have beyond a segment.
void CutLongerSegments(uint64_t segment_bytes, TierDirectory* dir);
// Releases the space of segments from `segments` on. Their files stay open, and are filled again
// by Grow: somebody may still write to them.
void ShrinkTierDirectory(uint32_t segments, TierDirectory* dir);

}  // namespace kvstrata::disk
