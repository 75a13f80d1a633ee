// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "kernels/cuda/cuda_library.h"
#include "server/daemon/daemon_parts.h"
#include "server/memory/numa_topology.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

std::vector<StoreDevice> EmulatedDevices(uint32_t count) {
  std::vector<StoreDevice> devices;
  for (uint32_t i = 0; i < count; ++i) {
    devices.push_back({i == 0 ? "emulated" : "emulated-" + std::to_string(i), NewEmulatedDevice()});
  }
  return devices;
}

// A GPU's pool takes at most what is free, but for what the daemon's own context and copies need.
Result<PoolResources> FindGpus(const Config& config) {
  constexpr uint64_t kReserve = uint64_t{512} << 20;
  KVS_ASSIGN_OR_RETURN(CudaDevices gpus, NewCudaDevices(config.devices.uuids));
  PoolResources found;
  KVS_ASSIGN_OR_RETURN(found.gpus.ops, cuda::LoadCudaOps());
  for (CudaDevice& gpu : gpus.devices) {
    const uint64_t most = gpu.free_bytes - std::min(gpu.free_bytes, kReserve);
    LogEvent(LogLevel::kInfo, "gpu",
             {{"device", gpu.uuid},
              {"free_bytes", gpu.free_bytes},
              {"pool_bytes", std::min(config.store.device_bytes, most)}});
    KVS_ASSIGN_OR_RETURN(found.gpus.packers.emplace_back(),
                         NewGpuPackers(*found.gpus.ops, gpu.ordinal));
    found.gpus.ordinals.push_back(gpu.ordinal);
    found.devices.push_back({gpu.uuid, std::move(gpu.memory), most});
  }
  found.host = std::move(gpus.host);
  return found;
}

// The host pool's memory, of `host`, on the NUMA nodes that it belongs to. gpus: by UUID.
Result<std::unique_ptr<MemoryResource>> PlaceHost(const HostNuma& numa,
                                                  std::unique_ptr<MemoryResource> host,
                                                  std::span<const std::string> gpus) {
  const bool automatic = numa.kind == HostNuma::Kind::kAuto;
  if (automatic && gpus.empty()) return host;
  const auto warn = [](const Status& why) {
    LogEvent(LogLevel::kWarn, "host_numa", {{"reason", why.reason()}, {"why", why.message()}});
  };
  const auto topology = NumaTopology::OfThisMachine();
  if (!topology.ok()) {
    warn(topology.status());
    return host;
  }
  std::vector<std::string> devices;
  for (const std::string& gpu : gpus) devices.push_back(PciBusIdOf(gpu));
  KVS_ASSIGN_OR_RETURN(NumaNodes nodes, (*topology)->Choose(numa, devices));
  if (nodes.empty()) return host;
  if (const Status placed = (*topology)->TryPlace(nodes); !placed.ok()) {
    warn(placed);
    return host;
  }
  std::string text;
  for (const uint32_t node : nodes) text += (text.empty() ? "" : ",") + std::to_string(node);
  LogEvent(LogLevel::kInfo, "host_numa", {{"nodes", text}});
  return NewPlacedResource(std::move(host), *topology, std::move(nodes));
}

}  // namespace

Result<PoolResources> FindPoolResources(const Config& config) {
  PoolResources found;
  std::vector<std::string> gpus;
  if (config.devices.emulated != 0) {
    found.devices = EmulatedDevices(config.devices.emulated);
    found.host = NewHostMemory();
  } else {
    KVS_ASSIGN_OR_RETURN(found, FindGpus(config));
    for (const StoreDevice& device : found.devices) gpus.push_back(device.name);
  }
  KVS_ASSIGN_OR_RETURN(found.host, PlaceHost(config.host_numa, std::move(found.host), gpus));
  return found;
}

}  // namespace kvstrata
