// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/command_line.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <utility>

#include "server/config/pool_memory.h"
#include "server/daemon/daemon.h"
#include "server/doctor/doctor.h"
#include "server/doctor/machine_check.h"
#include "server/telemetry/readiness.h"

namespace kvstrata {

LoadedConfig Load(const CommandLine& line) {
  ConfigSources sources;
  std::vector<Status> mistakes{CheckReadyFd(line.ready_fd)};
  std::error_code unknown;  // then it is told as it was given
  const auto file = std::filesystem::absolute(line.file, unknown).lexically_normal();
  sources.file = line.file.empty() || unknown ? line.file : file.string();
  sources.environment = ReadEnvironment();
  sources.uid = geteuid();
  for (const std::string& text : line.settings) {
    auto setting = ParseSetting(text);
    if (setting.ok()) sources.flags.push_back(*setting);
    mistakes.push_back(setting.status());
  }
  if (!line.socket.empty()) sources.flags.emplace_back("socket.path", line.socket);
  if (!line.log_level.empty()) sources.flags.emplace_back("log.level", line.log_level);
  LoadedConfig loaded = ReadConfig(sources);
  loaded.mistakes.insert(loaded.mistakes.begin(), mistakes.begin(), mistakes.end());
  std::erase_if(loaded.mistakes, [](const Status& status) { return status.ok(); });
  // A start that is refused anyway tells all that the check does.
  if ((line.check || !loaded.mistakes.empty()) && !line.deep && loaded.complete) {
    for (const Status& mistake : CheckMachine(loaded.config)) {
      loaded.mistakes.push_back(Located(mistake, loaded.config));
    }
    loaded.mistakes.push_back(CheckGpus(loaded.config));
  }
  std::erase_if(loaded.mistakes, [](const Status& status) { return status.ok(); });
  return loaded;
}

int TellFindings(const LoadedConfig& loaded, bool json) {
  const auto write = [](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  const char* comma = "";
  if (json) write("{\"uid\":" + std::to_string(geteuid()) + ",\"checks\":[");
  const std::vector<Finding> findings = Examine(loaded, [&](const Finding& finding) {
    write(json ? std::exchange(comma, ",") + JsonOf(finding) : TextOf(finding));
  });
  const bool healthy = IsHealthy(findings);
  if (json) write(std::string("],\"healthy\":") + (healthy ? "true" : "false") + "}\n");
  return healthy ? kExitClean : kExitFailed;
}

int TellCheck(const LoadedConfig& loaded) {
  for (const std::string& warning : loaded.config.warnings) {
    std::fprintf(stderr, "kvstratad: warning: %s\n", warning.c_str());
  }
  if (!loaded.mistakes.empty()) return kExitFailed;
  if (const Status chunks = CheckChunkMemory(loaded.config); !chunks.ok()) {
    std::fprintf(stderr, "kvstratad: warning: %s\n", chunks.message().c_str());
  }
  std::printf("configuration ok: %zu keys, socket %s\n", loaded.config.entries.size(),
              loaded.config.socket.c_str());
  for (const ConfigEntry& entry : loaded.config.entries) {
    std::printf("  %s = %s  (%s)\n", entry.key.c_str(), entry.value.c_str(),
                (entry.where.empty() ? entry.origin : entry.where).c_str());
  }
  return kExitClean;
}

}  // namespace kvstrata
