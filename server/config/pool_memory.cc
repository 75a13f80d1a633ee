// SPDX-License-Identifier: Apache-2.0
#include "server/config/pool_memory.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

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

}  // namespace kvstrata
