#include "server/pool_memory.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

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

void FitDefaults(const CgroupMemory& memory, std::string_view whose, Tell tell, Config* config) {
  const auto emulated = static_cast<int>(config->devices.emulated);
  const auto fit = [&](std::string_view key, uint64_t* bytes) {
    const auto entry = std::ranges::find(config->entries, key, &ConfigEntry::key);
    if (entry == config->entries.end() || entry->origin != "default") return;
    const uint64_t fitting = DefaultPoolBytes(memory, *bytes, 1 + emulated);
    if (fitting == *bytes) return;
    *bytes = fitting;
    if (tell == Tell::kNo) return;
    LogEvent(LogLevel::kWarn, "configuration",
             {{"key", key},
              {"why", std::string(whose) + " has less left than the default"},
              {"bytes", fitting}});
  };
  fit("pool.host_bytes", &config->store.host_bytes);
  if (emulated > 0) fit("pool.device_bytes", &config->store.device_bytes);
}

std::string MiB(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

Status CheckPhysical(uint64_t machine, const Config& config) {
  const uint64_t emulated = EmulatedBytes(config);
  if (machine == 0 || config.store.host_bytes + emulated <= machine) return OkStatus();
  std::string pools = "pool.host_bytes (" + MiB(config.store.host_bytes) + ")";
  if (emulated != 0) pools += " and pool.device_bytes (" + MiB(emulated) + ", emulated)";
  return InvalidArgument("POOL_BEYOND_MACHINE", pools + " are more than the " + MiB(machine) +
                                                    " of memory of this machine; lower them");
}

Status FitAndCheck(const std::optional<CgroupMemory>& cgroup, Tell tell, Config* config) {
  if (const uint64_t machine = MachineBytes(); machine != 0) {
    FitDefaults({"", machine, 0, 0}, "the machine", tell, config);
    KVS_RETURN_IF_ERROR(CheckPhysical(machine, *config));
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
  std::optional<CgroupMemory> cgroup = ReadCgroupMemory();
  if (cgroup) cgroup->charged = cgroup->reclaimable = 0;
  Config fitted = config;
  return FitAndCheck(cgroup, Tell::kNo, &fitted);
}

}  // namespace kvstrata
