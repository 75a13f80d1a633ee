// SPDX-License-Identifier: Apache-2.0
// A configuration against this machine: what a start would refuse, told before anything starts and
// all of it at once.
//
// Nothing is changed, and what only the moment decides (another daemon that serves the path, what a
// cgroup is charged) is left to the start. Thread-safety: none. Cost: some system calls; CheckGpus
// loads CUDA.
#ifndef KVSTRATA_SERVER_DOCTOR_MACHINE_CHECK_H_
#define KVSTRATA_SERVER_DOCTOR_MACHINE_CHECK_H_

#include <vector>

#include "base/status.h"
#include "server/config/config.h"

namespace kvstrata {

// Errors: of unix_listener.h, pool_memory.h, numa_topology.h,
// DiskTier::CheckPlace, remote_secret.h, RedisValueTier::Check and node_credentials.h;
// INVALID_ARGUMENT WORK_CPUS, NOT_FOUND PARAMETERS_DIRECTORY.
std::vector<Status> CheckMachine(const Config& config);

// OK without a GPU in pool.device. UNAVAILABLE CUDA_LIBRARY, CUDA_NO_DEVICE; NOT_FOUND
// DEVICE_UNKNOWN.
Status CheckGpus(const Config& config);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DOCTOR_MACHINE_CHECK_H_
