// SPDX-License-Identifier: Apache-2.0
// Limits of the process, of its cgroup and of the machine.
#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "base/spare_threads.h"
#include "server/config/pool_memory.h"
#include "server/doctor/doctor_checks.h"
#include "server/memory/cgroup.h"

namespace kvstrata::doctor {
namespace {

constexpr uint64_t kDescriptorsOfSession = 5;
constexpr uint64_t kDescriptorsBeside = 256;  // files of the disk tier, arenas, the reserve
constexpr uint64_t kUringBuffers = uint64_t{64} << 20;

uint64_t LimitOf(__rlimit_resource what, bool hard = false) {
  rlimit limit{};
  if (getrlimit(what, &limit) != 0) return RLIM_INFINITY;
  return hard ? limit.rlim_max : limit.rlim_cur;
}

std::string LimitText(uint64_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit);
}

// An entry of /proc/meminfo, in bytes; 0: not there.
uint64_t MeminfoBytes(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string key, unit; file >> key;) {
    uint64_t kib = 0;
    file >> kib;
    if (key == name + ":") return kib * 1024;
    std::getline(file, unit);
  }
  return 0;
}

bool HasCapability(int number) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("CapEff:")) continue;
    return (std::stoull(line.substr(7), nullptr, 16) >> number & 1) != 0;
  }
  return false;
}

uint64_t HostBytes(const Config& config) {
  return config.store.host_bytes + config.devices.emulated * config.store.device_bytes;
}

}  // namespace

Finding CheckMemlock(const Config& config) {
  constexpr int kIpcLock = 14;
  const uint64_t limit = LimitOf(RLIMIT_MEMLOCK);
  const std::string is = "RLIMIT_MEMLOCK is " + LimitText(limit);
  if (limit == RLIM_INFINITY || HasCapability(kIpcLock)) return Ok("memlock", is);
  if (config.devices.emulated == 0 && limit < config.store.host_bytes) {
    return Fail(
        "memlock",
        ResourceExhausted("HOST_UNREACHABLE", is + ", and the GPU's driver locks the host pool's " +
                                                  MiBText(config.store.host_bytes)),
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; compose: ulimits: {memlock: "
        "-1}; the same for clients");
  }
  if (!config.disk.directory.empty() && limit < kUringBuffers) {
    return Warn("memlock",
                is + "; io_uring locks up to " + MiBText(kUringBuffers) +
                    " of buffers, and is slower without",
                "ulimit -l 65536; systemd: LimitMEMLOCK=infinity");
  }
  const bool gpu = access("/dev/nvidiactl", F_OK) == 0;
  if (gpu && limit < config.chunk_bytes) {
    return Warn("memlock",
                is + "; engines on a GPU that are started so cannot pin chunks.bytes (" +
                    MiBText(config.chunk_bytes) + ")",
                "ulimit -l unlimited where engines start, or make chunks.bytes smaller");
  }
  return Ok("memlock", is + "; without a GPU that will do");
}

Finding CheckDescriptorLimit(const Config& config) {
  const uint64_t limit = LimitOf(RLIMIT_NOFILE, true);
  const uint64_t wanted = kDescriptorsOfSession * config.store.max_sessions + kDescriptorsBeside;
  const std::string is = "RLIMIT_NOFILE is " + LimitText(limit) + " (hard)";
  if (limit >= wanted) return Ok("descriptors", is);
  return Warn("descriptors",
              is + "; session.max = " + std::to_string(config.store.max_sessions) + " can take " +
                  std::to_string(wanted),
              "systemd: LimitNOFILE=" + std::to_string(wanted) + "; ulimit -Hn " +
                  std::to_string(wanted) + "; or lower session.max");
}

Finding CheckThreadLimit(const Config& config) {
  const uint32_t threads = StartThreads(config);
  const Status spare = CheckSpareThreads(static_cast<int>(threads));
  if (!spare.ok()) return Fail("threads", spare);
  return Ok("threads", std::to_string(threads) + " can be made");
}

Finding CheckMemory(const Config& config) {
  const uint64_t wanted = HostBytes(config) + config.chunk_bytes;
  const uint64_t available = MeminfoBytes("MemAvailable");
  const std::string pools = "the pools may take " + MiBText(HostBytes(config)) +
                            " of memory, and chunks.bytes " + MiBText(config.chunk_bytes);
  if (available != 0 && wanted > available) {
    return Warn("memory", pools + ", and " + MiBText(available) + " are available now",
                "stop what else takes memory, or lower pool.host_bytes, pool.device_bytes and "
                "chunks.bytes");
  }
  const auto cgroup = ReadCgroupMemory();
  if (cgroup && wanted > cgroup->available()) {
    return Warn("memory",
                pools + ", and the cgroup leaves " + MiBText(cgroup->available()) + " (" +
                    cgroup->file + ")",
                "raise the cgroup's memory.max (MemoryMax=, docker --memory), or lower "
                "pool.host_bytes, pool.device_bytes and chunks.bytes");
  }
  return Ok("memory", pools + "; available are " + MiBText(available) +
                          (cgroup ? ", of the cgroup " + MiBText(cgroup->available()) : ""));
}

Finding CheckOvercommit(const Config& config) {
  const auto mode = FirstWordOf("/proc/sys/vm/overcommit_memory");
  if (!mode || *mode != "2") {
    return Ok("overcommit", "vm.overcommit_memory is " + mode.value_or("not known"));
  }
  const uint64_t limit = MeminfoBytes("CommitLimit"), used = MeminfoBytes("Committed_AS");
  const uint64_t left = limit - std::min(limit, used);
  const std::string is = "vm.overcommit_memory is 2, and " + MiBText(left) + " can be committed";
  if (left > HostBytes(config)) return Ok("overcommit", is);
  return Warn("overcommit", is + ", less than the pools",
              "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio");
}

Finding CheckMappings(const Config&) {
  constexpr uint64_t kWanted = 16384;
  const auto most = FirstWordOf("/proc/sys/vm/max_map_count");
  const std::string is = "vm.max_map_count is " + most.value_or("not known");
  if (!most || std::stoull(*most) >= kWanted) return Ok("mappings", is);
  return Warn("mappings", is + "; every session maps each arena",
              "sysctl vm.max_map_count=" + std::to_string(4 * kWanted));
}

Finding CheckCpus(const Config& config) {
  cpu_set_t may;
  CPU_ZERO(&may);
  const bool known = sched_getaffinity(0, sizeof(may), &may) == 0;
  const int cores = known ? CPU_COUNT(&may) : static_cast<int>(std::thread::hardware_concurrency());
  std::string is = std::to_string(cores) + " cores";
  if (static_cast<int>(config.work.threads) >= cores && cores > 1) {
    return Warn("cpus", is + ", and work.threads = " + std::to_string(config.work.threads),
                "leave cores to engines: lower work.threads, or set work.cpus");
  }
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (file >> quota >> period && period > 0) {
    is += ", " + std::to_string(quota / period) + " of them by cpu.max";
    if (quota < period) {
      return Warn("cpus", is + ": the loop that serves clients is stopped now and again",
                  "give it a core at least: CPUQuota=100%, docker --cpus 1");
    }
  }
  return Ok("cpus", is);
}

Finding CheckNuma(const Config& config) {
  const auto topology = NumaTopology::OfThisMachine();
  if (!topology.ok()) {
    return Warn("numa", topology.status().message(), "set pool.host_numa = \"auto\"");
  }
  const NumaNodes nodes = (*topology)->nodes();
  const std::string is = std::to_string(nodes.size()) + " nodes with memory";
  const auto chosen = (*topology)->Choose(config.host_numa, {});
  if (chosen.ok() && !chosen->empty()) {
    const Status placed = (*topology)->TryPlace(*chosen);
    if (!placed.ok()) {
      return Warn("numa", placed.message(), "allow mbind in seccomp (docker: --cap-add SYS_NICE)");
    }
  }
  return Ok("numa", is);
}

}  // namespace kvstrata::doctor
