// SPDX-License-Identifier: Apache-2.0
// What the pools lie on: the devices of pool.device, emulated ones or GPUs, and the host pool's
// memory, placed on NUMA nodes as pool.host_numa says.
//
// Thread-safety: a function without state. Cost: of GPUs, that each gets a context. Errors: what
// NewCudaDevices, LoadCudaOps, NewGpuPackers and NumaTopology::Choose answer; memory that cannot be
// placed, where nobody asked for it, is a warning in the log.
#ifndef KVSTRATA_SERVER_DAEMON_POOL_RESOURCES_H_
#define KVSTRATA_SERVER_DAEMON_POOL_RESOURCES_H_

#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/codec/codec.h"
#include "kernels/cuda/cuda_ops.h"
#include "server/config/config.h"
#include "server/memory/memory_resource.h"
#include "server/store/store.h"

namespace kvstrata {

// What the daemon computes with on GPUs.
struct Gpus {
  const cuda::CudaOps* ops = nullptr;  // null: no GPU
  std::vector<int> ordinals;           // in this process, by device
  std::vector<GpuPackers> packers;     // by device
};

struct PoolResources {
  std::vector<StoreDevice> devices;
  std::unique_ptr<MemoryResource> host;
  Gpus gpus;
};
Result<PoolResources> FindPoolResources(const Config& config);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DAEMON_POOL_RESOURCES_H_
