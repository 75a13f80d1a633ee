// SPDX-License-Identifier: Apache-2.0
// NUMA: on which nodes of the machine the host pool's memory lies. Copies between a GPU and memory
// behind the other socket cross the sockets' link: slower, and in the way of everybody else's.
//
// By hwloc, which knows nodes and PCI devices of this machine, or of one that a test describes.
// Nodes are the kernel's numbers. A machine of one node needs none of this, and nothing is done.
// Thread-safety: const methods, any thread. Cost: loading takes tens of milliseconds on a large
// machine; a placement a system call, it touches no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/memory/memory_resource.h"

struct hwloc_topology;

namespace kvstrata {

// What `pool.host_numa` asks for.
struct HostNuma {
  enum class Kind : uint8_t {
    kAuto,        // near the GPUs; without one, where the kernel puts it
    kInterleave,  // over all nodes
    kNode,
  };
  Kind kind = Kind::kAuto;
  uint32_t node = 0;  // number for kNode
};
// "auto", "interleave", or a number below 1024.
std::optional<HostNuma> ParseHostNuma(std::string_view text);

// Where mappings lie: on the one node, or page by page over several. None: the kernel decides.
using NumaNodes = std::vector<uint32_t>;

class NumaTopology {
 public:
  // All: UNAVAILABLE NUMA_TOPOLOGY.
  static Result<std::shared_ptr<const NumaTopology>> OfThisMachine();
  // For tests: hwloc's synthetic descriptions ("numa:2 core:4") and its XML.
  static Result<std::shared_ptr<const NumaTopology>> Synthetic(const std::string& description);
  static Result<std::shared_ptr<const NumaTopology>> FromXml(const std::string& xml);
  ~NumaTopology();

  // The nodes that have memory, in order.
  NumaNodes nodes() const;
  // The nodes near a PCI device ("0000:17:00.0"); empty: it is absent, or equally near to all.
  NumaNodes NodesNear(const std::string& pci_bus_id) const;
  // Empty as well where there is but one node. INVALID_ARGUMENT NUMA_NODE: no such node.
  Result<NumaNodes> Choose(const HostNuma& wanted, std::span<const std::string> gpus) const;

  // Pages of [base, base + bytes) that are touched from now on, by whichever process, come from
  // these nodes while they have room, then from others. UNAVAILABLE NUMA_PLACEMENT: the kernel, or
  // a seccomp filter, forbids it. REQUIRES: some nodes.
  Status Place(const NumaNodes& nodes, std::byte* base, uint64_t bytes) const;
  // Whether Place works here.
  Status TryPlace(const NumaNodes& nodes) const;

 private:
  explicit NumaTopology(hwloc_topology* topology) : topology_(topology) {}
  static Result<std::shared_ptr<const NumaTopology>> Load(hwloc_topology* topology, bool described);

  hwloc_topology* const topology_;
};

// The PCI bus id of the GPU with this UUID, as NVIDIA's driver tells in /proc; "": it does not.
// `root` is put before every path.
std::string PciBusIdOf(const std::string& gpu_uuid, const std::string& root = "");

// Places each mapping of `upstream` before it is touched. What cannot be placed lies where the
// kernel puts it.
std::unique_ptr<MemoryResource> NewPlacedResource(std::unique_ptr<MemoryResource> upstream,
                                                  std::shared_ptr<const NumaTopology> topology,
                                                  NumaNodes nodes);

}  // namespace kvstrata
