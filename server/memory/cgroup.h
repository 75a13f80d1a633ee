// SPDX-License-Identifier: Apache-2.0
// What the cgroup of this process is charged for memory, and how much it allows: arenas on `host`
// are shared memory, which is charged when it is touched and cannot be reclaimed.
//
// Cgroup v2, else the memory controller of v1. Values; thread-safe. Units: bytes. Cost: some
// reads in /proc and /sys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"

namespace kvstrata {

struct CgroupMemory {
  std::string file;          // that has the limit
  uint64_t limit = 0;        // the smallest of the cgroup and those above it
  uint64_t charged = 0;      // to the cgroup that has it
  uint64_t reclaimable = 0;  // pages of files among that

  uint64_t available() const {
    const uint64_t held = charged - std::min(charged, reclaimable);
    return limit - std::min(limit, held);
  }
};

// Nothing: no limit, or none that can be read. `root` is put before every path.
std::optional<CgroupMemory> ReadCgroupMemory(const std::string& root = "");

// Bytes of host memory for a pool without a configured size: `wanted`, but at most an equal
// share of three quarters of what is available, in whole MiB. `pools`: how many such pools share
// it. Where nothing is available: `wanted`, which is then refused with the figures.
uint64_t DefaultPoolBytes(const CgroupMemory& cgroup, uint64_t wanted, int pools);

// RESOURCE_EXHAUSTED POOL_BEYOND_CGROUP: pools of host memory of these sizes would be more than is
// available. `emulated_device_bytes`: 0 when the device pool is a GPU's.
Status CheckCgroupBudget(const CgroupMemory& cgroup, uint64_t host_bytes,
                         uint64_t emulated_device_bytes);

}  // namespace kvstrata
