// SPDX-License-Identifier: Apache-2.0
#include "server/memory/numa_topology.h"

#include <hwloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr uint32_t kMostNodes = 1024;  // the kernel's MAX_NUMNODES, at most

Status LoadFailed(const char* call) {
  return Unavailable("NUMA_TOPOLOGY", std::string("hwloc: ") + call + ": " + std::strerror(errno) +
                                          "; set pool.host_numa = \"auto\" or look at /sys");
}

// A set of nodes for hwloc.
class NodeSet {
 public:
  explicit NodeSet(const NumaNodes& nodes) : bits_(hwloc_bitmap_alloc()) {
    KVS_CHECK(bits_ != nullptr);
    for (const uint32_t node : nodes) hwloc_bitmap_set(bits_, node);
  }
  NodeSet(const NodeSet&) = delete;
  NodeSet& operator=(const NodeSet&) = delete;
  ~NodeSet() { hwloc_bitmap_free(bits_); }
  hwloc_const_bitmap_t get() const { return bits_; }

 private:
  const hwloc_bitmap_t bits_;
};

std::string Listed(const NumaNodes& nodes) {
  std::string text;
  for (const uint32_t node : nodes) text += (text.empty() ? "" : ", ") + std::to_string(node);
  return text;
}

class PlacedResource final : public MemoryResource {
 public:
  PlacedResource(std::unique_ptr<MemoryResource> upstream,
                 std::shared_ptr<const NumaTopology> topology, NumaNodes nodes)
      : upstream_(std::move(upstream)), topology_(std::move(topology)), nodes_(std::move(nodes)) {}

  Result<MappedMemory> Allocate(uint64_t bytes) override {
    KVS_ASSIGN_OR_RETURN(MappedMemory memory, upstream_->Allocate(bytes));
    (void)topology_->Place(nodes_, memory.base, memory.bytes);
    return memory;
  }
  void Free(MappedMemory memory) override { upstream_->Free(std::move(memory)); }
  Status Copy(std::span<const MemoryCopy> copies) override { return upstream_->Copy(copies); }
  MemoryTraits traits() const override { return upstream_->traits(); }

 private:
  const std::unique_ptr<MemoryResource> upstream_;
  const std::shared_ptr<const NumaTopology> topology_;
  const NumaNodes nodes_;
};

}  // namespace

std::optional<HostNuma> ParseHostNuma(std::string_view text) {
  if (text == "auto") return HostNuma{};
  if (text == "interleave") return HostNuma{HostNuma::Kind::kInterleave, 0};
  HostNuma numa{HostNuma::Kind::kNode, 0};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), numa.node);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (numa.node >= kMostNodes) return std::nullopt;
  return numa;
}

Result<std::shared_ptr<const NumaTopology>> NumaTopology::Load(hwloc_topology* topology,
                                                               bool described) {
  const std::shared_ptr<const NumaTopology> loaded(new NumaTopology(topology));
  if (!described) return LoadFailed("hwloc_topology_set_*");
  // GPUs among them; they are devices that matter.
  hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc_topology_load(topology) != 0) return LoadFailed("hwloc_topology_load");
  return loaded;
}

Result<std::shared_ptr<const NumaTopology>> NumaTopology::OfThisMachine() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return LoadFailed("hwloc_topology_init");
  return Load(topology, true);
}

Result<std::shared_ptr<const NumaTopology>> NumaTopology::Synthetic(
    const std::string& description) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return LoadFailed("hwloc_topology_init");
  return Load(topology, hwloc_topology_set_synthetic(topology, description.c_str()) == 0);
}

Result<std::shared_ptr<const NumaTopology>> NumaTopology::FromXml(const std::string& xml) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return LoadFailed("hwloc_topology_init");
  const int size = static_cast<int>(xml.size() + 1);
  return Load(topology, hwloc_topology_set_xmlbuffer(topology, xml.c_str(), size) == 0);
}

NumaTopology::~NumaTopology() { hwloc_topology_destroy(topology_); }

NumaNodes NumaTopology::nodes() const {
  NumaNodes found;
  hwloc_obj_t node = nullptr;
  while ((node = hwloc_get_next_obj_by_type(topology_, HWLOC_OBJ_NUMANODE, node)) != nullptr) {
    if (node->attr->numanode.local_memory > 0) found.push_back(node->os_index);
  }
  std::ranges::sort(found);
  return found;
}

NumaNodes NumaTopology::NodesNear(const std::string& pci_bus_id) const {
  const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology_, pci_bus_id.c_str());
  if (device == nullptr) return {};
  const hwloc_obj_t near = hwloc_get_non_io_ancestor_obj(topology_, device);
  if (near == nullptr || near->nodeset == nullptr) return {};
  const NumaNodes all = nodes();
  NumaNodes found;
  std::ranges::copy_if(all, std::back_inserter(found), [near](uint32_t node) {
    return hwloc_bitmap_isset(near->nodeset, node) != 0;
  });
  return found.size() == all.size() ? NumaNodes() : found;
}

Result<NumaNodes> NumaTopology::Choose(const HostNuma& wanted,
                                       std::span<const std::string> gpus) const {
  const NumaNodes all = nodes();
  NumaNodes chosen;
  switch (wanted.kind) {
    case HostNuma::Kind::kAuto:
      for (const std::string& gpu : gpus) std::ranges::copy(NodesNear(gpu), back_inserter(chosen));
      std::ranges::sort(chosen);
      chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
      break;
    case HostNuma::Kind::kInterleave:
      chosen = all;
      break;
    case HostNuma::Kind::kNode:
      if (std::ranges::find(all, wanted.node) == all.end()) {
        return InvalidArgument("NUMA_NODE", "pool.host_numa = " + std::to_string(wanted.node) +
                                                "; nodes with memory here: " + Listed(all));
      }
      chosen = {wanted.node};
      break;
  }
  return all.size() > 1 ? chosen : NumaNodes();
}

Status NumaTopology::Place(const NumaNodes& nodes, std::byte* base, uint64_t bytes) const {
  KVS_CHECK(!nodes.empty());
  const hwloc_membind_policy_t policy =
      nodes.size() == 1 ? HWLOC_MEMBIND_BIND : HWLOC_MEMBIND_INTERLEAVE;
  // Not strict: a full node is no reason to kill the daemon.
  if (hwloc_set_area_membind(topology_, base, bytes, NodeSet(nodes).get(), policy,
                             HWLOC_MEMBIND_BYNODESET) == 0) {
    return OkStatus();
  }
  return Unavailable("NUMA_PLACEMENT", "memory on node " + Listed(nodes) + ": " +
                                           std::strerror(errno) +
                                           "; allow mbind in seccomp (Docker: cap SYS_NICE)");
}

Status NumaTopology::TryPlace(const NumaNodes& nodes) const {
  void* const at =
      mmap(nullptr, kMemoryGranularity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return Unavailable("NUMA_PLACEMENT", std::strerror(errno));
  const Status placed = Place(nodes, static_cast<std::byte*>(at), kMemoryGranularity);
  munmap(at, kMemoryGranularity);
  return placed;
}

std::string PciBusIdOf(const std::string& gpu_uuid, const std::string& root) {
  namespace fs = std::filesystem;
  std::error_code error;
  // A folder a GPU, named by its bus id.
  for (const fs::directory_entry& gpu :
       fs::directory_iterator(root + "/proc/driver/nvidia/gpus", error)) {
    std::ifstream information(gpu.path() / "information");
    for (std::string line; std::getline(information, line);) {
      if (line.starts_with("GPU UUID:") && line.ends_with(gpu_uuid)) return gpu.path().filename();
    }
  }
  return "";
}

std::unique_ptr<MemoryResource> NewPlacedResource(std::unique_ptr<MemoryResource> upstream,
                                                  std::shared_ptr<const NumaTopology> topology,
                                                  NumaNodes nodes) {
  return std::make_unique<PlacedResource>(std::move(upstream), std::move(topology),
                                          std::move(nodes));
}

}  // namespace kvstrata
