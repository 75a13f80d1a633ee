// SPDX-License-Identifier: Apache-2.0
#include "server/config/pool_memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>

#include "server/config/config_numbers.h"
#include "server/memory/cgroup.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

uint64_t MachineBytes() {
  const auto pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && bytes > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(bytes) : 0;
}

uint64_t EmulatedBytes(const Config& config) {
  return config.devices.emulated * config.store.device_bytes;
}

enum class Tell : uint8_t { kNo, kInLog };

bool IsDefault(const Config& config, std::string_view key) {
  const auto entry = std::ranges::find(config.entries, key, &ConfigEntry::key);
  return entry != config.entries.end() && entry->origin == "default";
}

// Defaults share what the sizes that somebody gave leave.
void FitDefaults(CgroupMemory memory, std::string_view whose, Tell tell, Config* config) {
  int defaults = 0;
  const auto count = [&](std::string_view key, uint64_t bytes, int pools) {
    if (IsDefault(*config, key)) {
      defaults += pools;
    } else {
      memory.limit -= std::min(memory.limit, bytes);
    }
  };
  count("pool.host_bytes", config->store.host_bytes, 1);
  count("pool.device_bytes", EmulatedBytes(*config), static_cast<int>(config->devices.emulated));
  const auto fit = [&](std::string_view key, uint64_t* bytes) {
    if (!IsDefault(*config, key)) return;
    const uint64_t fitting = DefaultPoolBytes(memory, *bytes, defaults);
    if (fitting == *bytes) return;
    *bytes = fitting;
    if (tell == Tell::kNo) return;
    LogEvent(LogLevel::kWarn, "configuration",
             {{"key", key},
              {"why", std::string(whose) + " has less left than the default"},
              {"bytes", fitting}});
  };
  fit("pool.host_bytes", &config->store.host_bytes);
  if (config->devices.emulated > 0) fit("pool.device_bytes", &config->store.device_bytes);
}

Status CheckPhysical(uint64_t machine, uint64_t host, uint64_t emulated) {
  if (machine == 0 || host + emulated <= machine) return OkStatus();
  std::string pools = "pool.host_bytes (" + MiB(host) + ")";
  if (emulated != 0) pools += " and pool.device_bytes (" + MiB(emulated) + ", emulated)";
  return InvalidArgument("POOL_BEYOND_MACHINE",
                         pools + " are more than the " + MiB(machine) +
                             " of memory of this machine; lower them to that or less together");
}

// With nothing charged to it: what is there now may go, and pools that are there are charged.
std::optional<CgroupMemory> EmptyCgroup() {
  std::optional<CgroupMemory> cgroup = ReadCgroupMemory();
  if (cgroup) cgroup->charged = cgroup->reclaimable = 0;
  return cgroup;
}

Status FitAndCheck(const std::optional<CgroupMemory>& cgroup, Tell tell, Config* config) {
  if (const uint64_t machine = MachineBytes(); machine != 0) {
    FitDefaults({"", machine, 0, 0}, "the machine", tell, config);
    KVS_RETURN_IF_ERROR(CheckPhysical(machine, config->store.host_bytes, EmulatedBytes(*config)));
  }
  if (!cgroup) return OkStatus();
  FitDefaults(*cgroup, "the cgroup", tell, config);
  return CheckCgroupBudget(*cgroup, config->store.host_bytes, EmulatedBytes(*config));
}

}  // namespace

Status FitPools(Config* config) {
  const std::optional<CgroupMemory> cgroup = ReadCgroupMemory();
  KVS_RETURN_IF_ERROR(FitAndCheck(cgroup, Tell::kInLog, config));
  if (!cgroup) return OkStatus();
  LogEvent(LogLevel::kInfo, "cgroup_memory",
           {{"file", cgroup->file},
            {"limit_bytes", cgroup->limit},
            {"charged_bytes", cgroup->charged},
            {"reclaimable_bytes", cgroup->reclaimable}});
  return OkStatus();
}

Status CheckPools(const Config& config) {
  Config fitted = config;
  return FitAndCheck(EmptyCgroup(), Tell::kNo, &fitted);
}

Status CheckChunkMemory(const Config& config) {
  Config fitted = config;
  const std::optional<CgroupMemory> cgroup = EmptyCgroup();
  const uint64_t chunks = config.chunk_bytes;
  if (chunks == 0 || !FitAndCheck(cgroup, Tell::kNo, &fitted).ok()) return OkStatus();
  const uint64_t pools = fitted.store.host_bytes + EmulatedBytes(fitted);
  const auto check = [&](uint64_t has, const std::string& whose) {
    const std::string is = "chunks.bytes is " + std::to_string(chunks) + " (" + MiB(chunks) + ")";
    if (chunks > has) {
      return ResourceExhausted("CHUNKS_MEMORY",
                               is + ", and " + whose + " has " + MiB(has) +
                                   ": engines that come to PATH.chunks will be refused; make "
                                   "chunks.bytes smaller (0: none are kept)");
    }
    if (IsDefault(config, "chunks.bytes") || chunks + pools <= has) return OkStatus();
    return ResourceExhausted("CHUNKS_MEMORY",
                             is + " beside pools of " + MiB(pools) + ", and " + whose + " has " +
                                 MiB(has) +
                                 ": when all of it is used, processes are killed; make "
                                 "chunks.bytes, pool.host_bytes or pool.device_bytes smaller");
  };
  if (const uint64_t machine = MachineBytes(); machine != 0) {
    KVS_RETURN_IF_ERROR(check(machine, "this machine"));
  }
  return cgroup ? check(cgroup->limit, "the daemon's cgroup (" + cgroup->file + ")") : OkStatus();
}

Status CheckCapacities(uint64_t host_bytes, uint64_t emulated_bytes) {
  KVS_RETURN_IF_ERROR(CheckPhysical(MachineBytes(), host_bytes, emulated_bytes));
  const std::optional<CgroupMemory> cgroup = EmptyCgroup();
  return cgroup ? CheckCgroupBudget(*cgroup, host_bytes, emulated_bytes) : OkStatus();
}

namespace {

// What a start was seen to take besides its threads, and half of that again for the first requests.
constexpr uint64_t kBesideThreads = 64 * kMiB;
// jemalloc's: an arena for each thread, up to four a core, of a first chunk and what describes it.
constexpr uint64_t kThreadArena = 5 * kMiB / 2;
constexpr uint32_t kArenasPerCore = 4;

uint32_t Cores() { return std::max(1u, std::thread::hardware_concurrency()); }

// A thread's stack, its guard included.
uint64_t StackBytes() {
  pthread_attr_t attributes;
  if (pthread_getattr_default_np(&attributes) != 0) return 8 * kMiB;
  size_t stack = 0, guard = 0;
  pthread_attr_getstacksize(&attributes, &stack);
  pthread_attr_getguardsize(&attributes, &guard);
  pthread_attr_destroy(&attributes);
  return stack + guard;
}

bool MayReserve(uint64_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const at = mmap(nullptr, bytes, PROT_NONE, kFlags, -1, 0);
  return at != MAP_FAILED && munmap(at, bytes) == 0;
}

}  // namespace

uint32_t OpThreads(const Config& config) { return config.threads != 0 ? config.threads : Cores(); }

uint32_t StartThreads(const Config& config) {
  constexpr uint32_t kOthers = 32;  // loops, the remote transport's queue, gRPC's
  return kOthers + config.work.threads + config.tier_pages.loads.readers + OpThreads(config);
}

Status CheckStartMemory(const Config& config) {
  const uint64_t threads = StartThreads(config), stack = StackBytes();
  const uint64_t arenas = std::min<uint64_t>(threads, uint64_t{kArenasPerCore} * Cores());
  const uint64_t needed = threads * stack + arenas * kThreadArena + kBesideThreads;
  if (MayReserve(needed)) return OkStatus();
  uint64_t left = needed / kMiB * kMiB;
  while (left > 0 && !MayReserve(left)) left -= kMiB;
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  return ResourceExhausted(
      "MEMORY", MiB(needed) + " of address space are needed to start, " + std::to_string(threads) +
                    " threads' stacks of " + std::to_string(stack / 1024) +
                    " KiB among them, and " + MiB(left) + " are left of a limit of " +
                    MiB(limit.rlim_cur) +
                    "; raise RLIMIT_AS (ulimit -v, LimitAS), or lower RLIMIT_STACK");
}

}  // namespace kvstrata
