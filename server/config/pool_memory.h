// SPDX-License-Identifier: Apache-2.0
// The pools' sizes against the memory that there is: this machine's, and what its cgroup leaves.
//
// A size that nobody gave makes room where there is less; one that somebody gave is refused there.
// Pools are touched when they are used, so what other programs hold now is no reason to refuse.
// Thread-safety: functions without state. Cost: some reads in /proc and /sys.
#pragma once

#include "base/status.h"
#include "server/config/config.h"

namespace kvstrata {

// Called at a start: fits the sizes that are defaults, and logs what it changes and what the cgroup
// has left. INVALID_ARGUMENT POOL_BEYOND_MACHINE; RESOURCE_EXHAUSTED POOL_BEYOND_CGROUP.
Status FitPools(Config* config);

// Whether a start could ever succeed, whatever is charged to the cgroup now. The same errors.
Status CheckPools(const Config& config);

// Whether engines get chunks.bytes, and the machine and the cgroup hold them beside the pools; the
// latter is told only if somebody gave the size. RESOURCE_EXHAUSTED CHUNKS_MEMORY: a start warns.
Status CheckChunkMemory(const Config& config);

// As CheckPools, for capacities that pools are to get while the daemon runs; `emulated_bytes`: of
// all emulated devices together.
Status CheckCapacities(uint64_t host_bytes, uint64_t emulated_bytes);

// Address space for a start: what a limit (RLIMIT_AS) leaves, before anything is started that
// cannot do without. The allocator crashes when a thread's first allocation finds none, and gRPC
// aborts.

// Threads for the daemon's ops.
uint32_t OpThreads(const Config& config);
// Threads that the daemon makes when it starts, gRPC's too.
uint32_t StartThreads(const Config& config);

// RESOURCE_EXHAUSTED MEMORY: how much is needed, and left. Reserves it for a moment, touches
// nothing. Any thread.
Status CheckStartMemory(const Config& config);

}  // namespace kvstrata
