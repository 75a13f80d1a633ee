// kvstratad: the daemon. Nothing is required; docs/operations.md and --help say the rest.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "server/config.h"
#include "server/daemon.h"
#include "server/telemetry/readiness.h"

namespace {

constexpr char kFooter[] =
    "Every key of docs/configuration.md can be given in the file, as an environment variable\n"
    "(pool.device_bytes is KVSTRATA_POOL_DEVICE_BYTES) or with --set.\n"
    "Exit codes: 0 clean, 1 failed, 2 usage or configuration, 3 socket in use, 4 permission.\n"
    "Example:\n"
    "  kvstratad --socket /tmp/kv/k.sock --set 'plans.long=quest{budget = 4096}'\n";

struct Flags {
  std::string socket, file, log_level;
  std::vector<std::string> settings;
  bool check = false;
  int ready_fd = -1;
};

kvstrata::Result<kvstrata::Config> Load(const Flags& flags) {
  kvstrata::ConfigSources sources;
  sources.file = flags.file;
  sources.environment = kvstrata::ReadEnvironment();
  sources.uid = geteuid();
  for (const std::string& text : flags.settings) {
    KVS_ASSIGN_OR_RETURN(auto setting, kvstrata::ParseSetting(text));
    sources.flags.push_back(std::move(setting));
  }
  if (!flags.socket.empty()) sources.flags.emplace_back("socket.path", flags.socket);
  if (!flags.log_level.empty()) sources.flags.emplace_back("log.level", flags.log_level);
  KVS_RETURN_IF_ERROR(kvstrata::CheckReadyFd(flags.ready_fd));
  return kvstrata::LoadConfig(sources);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("kvstratad: memory tier for the KV caches of long-context LLMs", "kvstratad");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string(kvstrata::DaemonVersion()) + " (" +
                                        std::string(kvstrata::DaemonCommit()) + ")");
  app.add_option("--socket", flags.socket, "serve gRPC at PATH and attach at PATH.attach")
      ->type_name("PATH");
  app.add_option("--config", flags.file, "TOML file; default /etc/kvstrata/kvstratad.toml if any")
      ->type_name("FILE");
  app.add_flag("--check-config", flags.check, "check the configuration and exit with 0 or 1");
  app.add_option("--set", flags.settings, "override one key; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  app.add_option("--log-level", flags.log_level, "trace, debug, info, warn or error");
  app.add_option("--ready-fd", flags.ready_fd, "write one byte to FD when serving")
      ->type_name("FD");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kvstrata::kExitClean : kvstrata::kExitUsage;
  }
  const kvstrata::Result<kvstrata::Config> config = Load(flags);
  if (!config.ok()) {
    std::fprintf(stderr, "kvstratad: %s\n", config.status().ToString().c_str());
    return flags.check ? kvstrata::kExitFailed : kvstrata::ExitCodeOf(config.status());
  }
  if (flags.check) {
    std::printf("configuration ok: %zu keys, socket %s\n", config->entries.size(),
                config->socket.c_str());
    return kvstrata::kExitClean;
  }
  return kvstrata::RunDaemon(config.value(), flags.ready_fd);
}
