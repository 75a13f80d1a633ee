// SPDX-License-Identifier: Apache-2.0
// kvstratad: the daemon. Nothing is required; docs/operations.md and --help say the rest.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <new>
#include <string>

#include "server/config/config_keys.h"
#include "server/daemon/command_line.h"
#include "server/daemon/daemon.h"
#include "server/daemon/manual_page.h"

namespace {

void AddOptions(CLI::App* app, kvstrata::CommandLine* flags) {
  app->footer(kvstrata::HelpFooter());
  app->set_version_flag("--version", std::string(kvstrata::DaemonVersion()) + " (" +
                                         std::string(kvstrata::DaemonCommit()) + ")");
  app->add_option("--socket", flags->socket, "serve gRPC at PATH and attach at PATH.attach")
      ->type_name("PATH");
  app->add_option(
         "--config", flags->file,
         "TOML file, then conf.d/*.toml beside it; default /etc/kvstrata/kvstratad.toml if any")
      ->type_name("FILE");
  CLI::Option* const check =
      app->add_flag("--check-config", flags->check,
                    "check the configuration against this machine and exit with 0 or 1");
  app->add_flag("--deep", flags->deep,
                "with --check-config: look at limits, disk, sockets, clocks, GPUs too; prints all")
      ->needs(check);
  app->add_option_function<std::string>(
         "-o,--output", [flags](const std::string& form) { flags->json = form == "json"; },
         "form of --deep: text or json")
      ->check(CLI::IsMember({"text", "json"}));
  app->add_option("--set", flags->settings, "override one key; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  app->add_option("--log-level", flags->log_level, "trace, debug, info, warn or error");
  app->add_option("--ready-fd", flags->ready_fd, "write one byte to FD when serving")
      ->type_name("FD");
  app->add_flag("--manual", flags->manual, "print kvstratad(1)")->group("");  // for the build
}

// "; did you mean '--socket'?" for the first argument that is none, "" where no option is near.
std::string NearestOption(const CLI::App& app) {
  const std::string first = app.remaining().empty() ? "" : app.remaining().front();
  const std::string given = first.substr(0, first.find('='));
  std::string nearest;
  size_t least = std::max<size_t>(2, given.size() / 4) + 1;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const size_t distance = kvstrata::EditDistance(given, "--" + name);
      if (distance >= least || option->get_group().empty()) continue;
      least = distance;
      nearest = "--" + name;
    }
  }
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

int Run(int argc, char** argv) {
  kvstrata::CommandLine flags;
  CLI::App app("kvstratad: memory tier for the KV caches of long-context LLMs", "kvstratad");
  AddOptions(&app, &flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError& error) {
    std::fprintf(stderr, "kvstratad: %s%s; kvstratad --help lists what is\n", error.what(),
                 NearestOption(app).c_str());
    return kvstrata::kExitUsage;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kvstrata::kExitClean : kvstrata::kExitUsage;
  }
  if (flags.manual) {
    const std::string page = kvstrata::DaemonManualPage(app);
    return std::fwrite(page.data(), 1, page.size(), stdout) == page.size() ? kvstrata::kExitClean
                                                                           : kvstrata::kExitFailed;
  }
  const kvstrata::LoadedConfig loaded = kvstrata::Load(flags);
  if (flags.deep) return kvstrata::TellFindings(loaded, flags.json);
  for (const kvstrata::Status& mistake : loaded.mistakes) {
    std::fprintf(stderr, "kvstratad: %s\n", kvstrata::OneLine(mistake.ToString()).c_str());
  }
  if (flags.check) return kvstrata::TellCheck(loaded);
  if (!loaded.mistakes.empty()) return kvstrata::ExitCodeOf(loaded.mistakes.front());
  return kvstrata::RunDaemon(loaded.config, flags.ready_fd);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs(
        "kvstratad: MEMORY: there is no memory to start with; raise RLIMIT_AS or the "
        "cgroup's memory.max\n",
        stderr);
    return kvstrata::kExitFailed;
  }
}
