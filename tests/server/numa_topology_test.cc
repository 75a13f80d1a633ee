// SPDX-License-Identifier: Apache-2.0
// Where the host pool's memory is put, on machines that hwloc is told about; and on this one.
#include "server/memory/numa_topology.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <filesystem>
#include <fstream>

#include "tests/fakes/scratch_dir.h"

namespace kvstrata {
namespace {

using Kind = HostNuma::Kind;
constexpr HostNuma kAuto{}, kInterleave{Kind::kInterleave, 0};

std::shared_ptr<const NumaTopology> Machine(const char* synthetic) {
  auto topology = NumaTopology::Synthetic(synthetic);
  EXPECT_TRUE(topology.ok()) << topology.status().ToString();
  return *topology;
}

// Two packages with a node and a GPU each, and a GPU at the machine itself.
std::shared_ptr<const NumaTopology> MachineWithGpus() {
  const auto sets = [](const std::string& bits) {
    return "cpuset=\"" + bits + "\" complete_cpuset=\"" + bits + "\" nodeset=\"" + bits +
           "\" complete_nodeset=\"" + bits + "\"";
  };
  const auto gpu = [](const std::string& bus, const std::string& id) {
    return "<object type=\"Bridge\" gp_index=\"4" + id +
           "\" bridge_type=\"0-1\" depth=\"0\" bridge_pci=\"0000:[" + bus + "-" + bus +
           "]\">\n<object type=\"PCIDev\" gp_index=\"5" + id + "\" pci_busid=\"0000:" + bus +
           ":00.0\" pci_type=\"0302 [10de:2330] [10de:16c1] a1\" pci_link_speed=\"0.0\"/>\n"
           "</object>\n";
  };
  const auto package = [&](const std::string& id, const std::string& bits, const std::string& bus) {
    const std::string at = "os_index=\"" + id + "\" " + sets(bits);
    return "<object type=\"Package\" " + at + " gp_index=\"1" + id + "\">\n" +
           "<object type=\"NUMANode\" " + at + " gp_index=\"2" + id +
           "\" local_memory=\"1073741824\"/>\n" + "<object type=\"PU\" " + at + " gp_index=\"3" +
           id + "\"/>\n" + gpu(bus, id) + "</object>\n";
  };
  auto topology = NumaTopology::FromXml(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n"
      "<topology version=\"2.0\">\n<object type=\"Machine\" os_index=\"0\" " +
      sets("0x00000003") +
      " allowed_cpuset=\"0x00000003\" allowed_nodeset=\"0x00000003\" gp_index=\"1\">\n" +
      package("0", "0x00000001", "17") + package("1", "0x00000002", "85") + gpu("f0", "9") +
      "</object>\n</topology>\n");
  EXPECT_TRUE(topology.ok()) << topology.status().ToString();
  return *topology;
}

TEST(HostNuma, IsParsed) {
  EXPECT_EQ(ParseHostNuma("auto")->kind, Kind::kAuto);
  EXPECT_EQ(ParseHostNuma("interleave")->kind, Kind::kInterleave);
  EXPECT_EQ(ParseHostNuma("3")->kind, Kind::kNode);
  EXPECT_EQ(ParseHostNuma("3")->node, 3u);
  for (const char* wrong : {"", "near", "-1", "1024", "1,2", "0 "}) {
    EXPECT_FALSE(ParseHostNuma(wrong)) << wrong;
  }
}

TEST(NumaTopology, OneNodeNeedsNothing) {
  const auto machine = Machine("package:1 numa:1 core:4 pu:1");
  EXPECT_EQ(machine->nodes(), NumaNodes({0}));
  for (const HostNuma& wanted : {kAuto, kInterleave, HostNuma{Kind::kNode, 0}}) {
    EXPECT_EQ(machine->Choose(wanted, {}).value(), NumaNodes());
  }
  EXPECT_EQ(machine->Choose({Kind::kNode, 1}, {}).status().reason(), "NUMA_NODE");
}

TEST(NumaTopology, InterleavesOverNodesWithMemory) {
  EXPECT_EQ(Machine("package:2 numa:2 core:2 pu:1")->Choose(kInterleave, {}).value(),
            NumaNodes({0, 1, 2, 3}));
}

TEST(NumaTopology, ANodeIsTakenIfItIsThere) {
  const auto machine = Machine("package:2 numa:1 core:2 pu:1");
  EXPECT_EQ(machine->Choose({Kind::kNode, 1}, {}).value(), NumaNodes({1}));
  const auto none = machine->Choose({Kind::kNode, 2}, {});
  EXPECT_EQ(none.status().reason(), "NUMA_NODE");
  EXPECT_NE(none.status().message().find("0, 1"), std::string::npos) << none.status().ToString();
}

TEST(NumaTopology, AutoWithoutAGpuIsTheKernels) {
  EXPECT_EQ(Machine("package:2 numa:1 core:2 pu:1")->Choose(kAuto, {}).value(), NumaNodes());
}

TEST(NumaTopology, AutoIsNearTheGpus) {
  const auto machine = MachineWithGpus();
  const std::string first = "0000:17:00.0", second = "0000:85:00.0", middle = "0000:f0:00.0";
  EXPECT_EQ(machine->NodesNear(second), NumaNodes({1}));
  const auto choose = [&](std::vector<std::string> gpus) {
    return machine->Choose(kAuto, gpus).value();
  };
  EXPECT_EQ(choose({first}), NumaNodes({0}));
  EXPECT_EQ(choose({second}), NumaNodes({1}));
  EXPECT_EQ(choose({second, first, second}), NumaNodes({0, 1}));
  EXPECT_EQ(choose({middle}), NumaNodes()) << "as near to either";
  EXPECT_EQ(choose({"0000:99:00.0"}), NumaNodes()) << "not there";
  EXPECT_EQ(machine->Choose(kInterleave, std::vector{first}).value(), NumaNodes({0, 1}));
}

TEST(NumaTopology, ADescriptionThatIsNoneIsRefused) {
  EXPECT_EQ(NumaTopology::Synthetic("numa:x").status().reason(), "NUMA_TOPOLOGY");
  EXPECT_EQ(NumaTopology::FromXml("<topology/>").status().reason(), "NUMA_TOPOLOGY");
}

TEST(NumaTopology, BlocksOfThisMachineArePlacedAndWork) {
  const auto machine = NumaTopology::OfThisMachine();
  ASSERT_TRUE(machine.ok()) << machine.status().ToString();
  const NumaNodes nodes = (*machine)->nodes();
  ASSERT_FALSE(nodes.empty());
  if (const Status placed = (*machine)->TryPlace(nodes); !placed.ok()) {
    EXPECT_EQ(placed.reason(), "NUMA_PLACEMENT");
    std::printf("not placed here: %s\n", placed.ToString().c_str());
  }
  const auto memory = NewPlacedResource(NewHostMemory(), *machine, nodes);
  Result<MappedMemory> mapped = memory->Allocate(1 << 20);
  ASSERT_TRUE(mapped.ok());
  mapped->base[12345] = std::byte{7};
  EXPECT_EQ(mapped->base[12345], std::byte{7});
  EXPECT_EQ(memory->name(), "host");
  memory->Free(std::move(*mapped));
}

TEST(PciBusId, IsWhatTheDriverSays) {
  const ScratchDir directory;
  const std::string& root = directory.path();
  for (const auto& [bus, uuid] :
       {std::pair{"0000:17:00.0", "GPU-aa"}, std::pair{"0000:85:00.0", "GPU-bb"}}) {
    const std::string folder = root + "/proc/driver/nvidia/gpus/" + bus;
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/information")
        << "Model: \t\t NVIDIA H100\nIRQ:   \t\t 60\nGPU UUID: \t " << uuid << "\nBus Location: \t "
        << bus << "\n";
  }
  EXPECT_EQ(PciBusIdOf("GPU-bb", root), "0000:85:00.0");
  EXPECT_EQ(PciBusIdOf("GPU-aa", root), "0000:17:00.0");
  EXPECT_EQ(PciBusIdOf("GPU-cc", root), "");
  EXPECT_EQ(PciBusIdOf("GPU-aa", root + "/nowhere"), "");
}

}  // namespace
}  // namespace kvstrata
