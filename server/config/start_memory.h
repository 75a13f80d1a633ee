// SPDX-License-Identifier: Apache-2.0
// Address space for a start: what a limit (RLIMIT_AS) leaves, before anything is started that
// cannot do without. The allocator crashes when a thread's first allocation finds none, and gRPC
// aborts.
#ifndef KVSTRATA_SERVER_CONFIG_START_MEMORY_H_
#define KVSTRATA_SERVER_CONFIG_START_MEMORY_H_

#include "base/status.h"
#include "server/config/config.h"

namespace kvstrata {

// Threads for the daemon's ops.
uint32_t OpThreads(const Config& config);
// Threads that the daemon makes when it starts, gRPC's too.
uint32_t StartThreads(const Config& config);

// RESOURCE_EXHAUSTED MEMORY: how much is needed, and left. Reserves it for a moment, touches
// nothing. Any thread.
Status CheckStartMemory(const Config& config);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_START_MEMORY_H_
