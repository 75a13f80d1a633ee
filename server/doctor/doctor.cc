// SPDX-License-Identifier: Apache-2.0
#include "server/doctor/doctor.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "proto/reasons.h"
#include "server/doctor/doctor_checks.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace doctor {

Finding Ok(std::string check, std::string what) {
  return {std::move(check), Verdict::kOk, "", std::move(what), ""};
}

Finding Warn(std::string check, std::string what, std::string fix) {
  return {std::move(check), Verdict::kWarn, "", std::move(what), std::move(fix)};
}

// Without a fix of its own: the table's, else the message says it.
Finding Fail(std::string check, const Status& why, std::string fix) {
  const auto at = FindReason(why.reason());
  if (fix.empty() && at) fix = AllReasons()[*at].next;
  if (fix.empty()) fix = "do what the message says; kvstrata explain " + why.reason();
  return {std::move(check), Verdict::kFail, why.reason(), why.message(), std::move(fix)};
}

std::string MiBText(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::optional<std::string> FirstWordOf(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (file >> word) return word;
  return std::nullopt;
}

namespace {

struct Check {
  Finding (*run)(const Config&);
  bool by_config = true;         // judges the machine by what the configuration asks of it
  std::string_view behind = "";  // the check without which there is nothing to judge
};
constexpr Check kChecks[] = {{CheckMemory},
                             {CheckOvercommit},
                             {CheckMappings, false},
                             {CheckMemlock},
                             {CheckDescriptorLimit},
                             {CheckThreadLimit},
                             {CheckCpus},
                             {CheckNuma},
                             {CheckGpu},
                             {CheckMps},
                             {CheckFreeDisk},
                             {CheckDirectIo, true, "disk_space"},
                             {CheckIoUring},
                             {CheckSocket},
                             {CheckBacklog, false},
                             {CheckHttp},
                             {CheckSharedMemory, false},
                             {CheckProcessNamespaces, false},
                             {CheckPassedDescriptors, false},
                             {CheckClocks, false},
                             {CheckRemoteFiles},
                             {CheckAnnounce},
                             {CheckRemoteServers}};  // which may take seconds

// Which check a mistake of CheckMachine belongs to, by the beginning of its reason.
constexpr std::pair<std::string_view, std::string_view> kCheckOf[] = {
    {"POOL_", "memory"},           {"MEMORY", "address_space"},
    {"SOCKET_", "socket"},         {"NUMA_", "numa"},
    {"WORK_CPUS", "cpus"},         {"DISK_", "disk_space"},
    {"PARAMETERS_", "parameters"}, {"REMOTE_", "remote_files"},
    {"REDIS_", "remote_files"}};

std::string CheckOf(const Status& mistake) {
  for (const auto& [reason, check] : kCheckOf) {
    if (mistake.reason().starts_with(reason)) return std::string(check);
  }
  return "machine";
}

// A fix that is nearer than the table's, "" without one.
std::string FixOf(const Status& mistake, const Config& config) {
  if (mistake.reason() == "DISK_PATH" && mistake.code() == Code::kNotFound) {
    std::filesystem::path folder = config.disk.directory;
    if (!folder.has_filename()) folder = folder.parent_path();
    return "install -d -o kvstrata -m 0700 " + folder.string() +
           ", with the daemon's user for kvstrata; or choose another disk.path";
  }
  // A new secret would end what the nodes share.
  if (mistake.reason() == "REMOTE_SECRET" && mistake.code() == Code::kPermissionDenied) {
    const std::string& file = config.remote.secret_file;
    struct stat st {};
    const bool own = stat(file.c_str(), &st) == 0 && st.st_uid == geteuid();
    return (own ? "" : "chown " + std::to_string(geteuid()) + " " + file + " && ") + "chmod 600 " +
           file;
  }
  return "";
}

Finding WithoutMistake(const Config& config) {
  const auto given = std::ranges::count_if(
      config.entries, [](const ConfigEntry& entry) { return entry.origin != "default"; });
  std::string from;
  for (const std::string& file : config.files) from += (from.empty() ? "" : ", ") + file;
  if (!from.empty()) {
    return Ok("configuration",
              from + ", " + std::to_string(config.entries.size()) + " keys, without a mistake");
  }
  return Ok("configuration",
            "no file: built-in defaults are judged, but for " + std::to_string(given) +
                " keys of environment and flags; a daemon's own file is judged with --config FILE");
}

std::string Json(std::string_view text) {
  const std::string member = FormatEvent(LogFormat::kJson, text, {});
  return member.substr(member.find(':') + 1);
}

}  // namespace
}  // namespace doctor

std::string_view NameOf(Verdict verdict) {
  static constexpr std::string_view kNames[] = {"OK", "WARN", "FAIL"};
  return kNames[static_cast<size_t>(verdict)];
}

std::vector<Finding> Examine(const LoadedConfig& loaded,
                             const std::function<void(const Finding&)>& tell) {
  std::vector<Finding> findings;
  const auto add = [&](Finding finding) {
    findings.push_back(std::move(finding));
    tell(findings.back());
  };
  for (const Status& mistake : loaded.mistakes) add(doctor::Fail("configuration", mistake));
  for (const std::string& warning : loaded.config.warnings) {
    add(doctor::Warn("configuration", warning, "rename the variable, or unset it"));
  }
  if (findings.empty()) add(doctor::WithoutMistake(loaded.config));
  if (!loaded.complete) return findings;           // nothing is known about what follows
  const bool mistaken = !loaded.mistakes.empty();  // those keys have their defaults meanwhile
  if (mistaken) {
    add(doctor::Warn("machine",
                     "not checked: the configuration has mistakes; what it asks of memory, "
                     "limits, GPU, disk and sockets is judged without them",
                     "mend the configuration and run doctor again"));
  }
  std::set<std::string> failed;
  for (const Status& mistake : mistaken ? std::vector<Status>() : CheckMachine(loaded.config)) {
    add(doctor::Fail(doctor::CheckOf(mistake), Located(mistake, loaded.config),
                     doctor::FixOf(mistake, loaded.config)));
    failed.insert(findings.back().check);
  }
  for (const doctor::Check& check : doctor::kChecks) {
    if (mistaken && check.by_config) continue;
    if (failed.contains(std::string(check.behind))) continue;
    Finding finding = check.run(loaded.config);
    if (!failed.contains(finding.check)) add(std::move(finding));
  }
  return findings;
}

bool IsHealthy(const std::vector<Finding>& findings) {
  return std::ranges::none_of(findings,
                              [](const Finding& f) { return f.verdict == Verdict::kFail; });
}

std::string TextOf(const Finding& f) {
  std::string head(NameOf(f.verdict));
  head.resize(6, ' ');
  head += f.check;
  head.resize(std::max<size_t>(head.size() + 1, 26), ' ');
  std::string out = head + (f.reason.empty() ? "" : f.reason + ": ") + OneLine(f.what) + "\n";
  if (!f.fix.empty()) out += std::string(26, ' ') + "fix: " + f.fix + "\n";
  return out;
}

std::string JsonOf(const Finding& f) {
  return "{\"check\":" + doctor::Json(f.check) + ",\"verdict\":" + doctor::Json(NameOf(f.verdict)) +
         ",\"reason\":" + doctor::Json(f.reason) + ",\"what\":" + doctor::Json(f.what) +
         ",\"fix\":" + doctor::Json(f.fix) + "}";
}

}  // namespace kvstrata
