// SPDX-License-Identifier: Apache-2.0
// kvstratad: the daemon. Nothing is required; docs/operations.md and --help say the rest.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/roff.h"
#include "server/config/config.h"
#include "server/config/config_keys.h"
#include "server/config/pool_memory.h"
#include "server/daemon/daemon.h"
#include "server/doctor/doctor.h"
#include "server/telemetry/readiness.h"

namespace kvstrata {
namespace {

// What the command line of kvstratad says, as a configuration: main.cc parses the flags, this reads
// everything else. Thread-safety: none; before any thread.
struct CommandLine {
  std::string socket, file, log_level;
  std::vector<std::string> settings;  // KEY=VALUE
  bool check = false;                 // --check-config
  bool deep = false;                  // --deep: and what doctor.h looks at
  bool json = false;                  // -o json
  bool manual = false;                // --manual: prints its manual page
  int ready_fd = -1;
};

// With all mistakes: of the flags, of the configuration and, to check (but not deep), of what this
// machine is.
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

// The same of --deep: all findings to stdout.
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

// The end of --check-config: warnings to stderr, the good news to stdout; the exit code.
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

// What kvstratad(1) says, and --help in short: exit codes, signals, files. docs/operations.md has
// the same, with more about each; tests/cli/manual_page_test.py holds the three together.
//
// Constant tables and pure functions.

struct ExitCodeRow {
  int code;
  std::string_view name, examples;
};
constexpr ExitCodeRow kExitCodes[] = {
    {kExitClean, "clean",
     "Ended by SIGTERM, SIGINT or SIGQUIT; --help, --version; --check-config of a good "
     "configuration."},
    {kExitFailed, "failed",
     "The kernel refused memory, descriptors or threads; shutdown.timeout passed; --check-config "
     "of "
     "a bad configuration."},
    {kExitUsage, "usage or configuration",
     "An unknown flag or key, a value out of range, a path that cannot be used, more memory than "
     "the machine has."},
    {kExitInUse, "in use",
     "Another daemon has the socket or the disk tier, or another program listens there or at "
     "http.listen."},
    {kExitPermission, "permission",
     "A path may not be read or written, is another user's, or lets others replace what lies "
     "there."},
};

struct Row {
  std::string_view term, meaning;
};
constexpr Row kSignals[] = {
    {"SIGTERM, SIGINT, SIGQUIT",
     "A clean end, exit code 0, whatever clients do; after shutdown.timeout exit code 1. Before it "
     "what engines have computed is written, for shutdown.write_timeout or until another signal."},
    {"SIGHUP",
     "The configuration's files are read again. What can change while it runs does, and the log "
     "names the rest. With a mistake anywhere nothing changes."},
    {"SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO, SIGPWR, SIGSTKFLT, the real-time ones",
     "Are told in the log, and do nothing else."},
    {"SIGPIPE, SIGXFSZ", "Are ignored: the write fails."},
};
constexpr Row kFiles[] = {
    {"/etc/kvstrata/kvstratad.toml", "The configuration, if --config names no other."},
    {"/etc/kvstrata/conf.d/*.toml",
     "Read after it, in the order of their names; of a key that several files give the last value "
     "counts. With --config the folder conf.d beside that file."},
    {"$XDG_RUNTIME_DIR/kvstrata/kvstratad.sock, /run/kvstrata/kvstratad.sock, "
     "/tmp/kvstrata-UID/kvstratad.sock",
     "The socket where socket.path is not set: the first whose folder is the user's; the second is "
     "root's."},
    {"SOCKET.attach, SOCKET.lock",
     "Beside the socket: where engines attach, and what makes the daemon the only one."},
    {"disk.path", "The folder of the disk tier; none unless that key is set."},
};
constexpr std::string_view kVariables =
    "Every key of docs/configuration.md can be given in the file, as an environment variable\n"
    "(pool.device_bytes is KVSTRATA_POOL_DEVICE_BYTES) or with --set.\n";
constexpr std::string_view kExample =
    "kvstratad --socket /tmp/kv/k.sock --set 'plans.long=quest{budget = 4096}'";

std::string Paragraphs(std::span<const Row> rows) {
  std::string out;
  for (const Row& row : rows) out += RoffParagraph(row.term, row.meaning);
  return out;
}

std::string OptionParagraphs(const CLI::App& app) {
  const CLI::Formatter formatter;
  std::string out;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    out += RoffParagraph(
        formatter.make_option_name(option, false) + formatter.make_option_opts(option),
        option->get_description());
  }
  return out;
}

std::string KeyParagraphs() {
  std::string out;
  for (const ConfigKey& key : ConfigKeys()) {
    std::string meaning(key.description);
    meaning += "; " + std::string(key.allowed);
    if (!key.fallback.empty()) meaning += "; default " + std::string(key.fallback);
    if (key.reloads) meaning += "; may change while it runs";
    out += RoffParagraph(std::string(key.name) + ", " + EnvironmentOf(key), meaning);
  }
  return out;
}

// What --help ends with.
std::string HelpFooter() {
  std::string codes;
  for (const ExitCodeRow& row : kExitCodes) {
    codes += (codes.empty() ? "" : ", ") + std::to_string(row.code) + " " + std::string(row.name);
  }
  return std::string(kVariables) + "Exit codes: " + codes + ".\nExample:\n  " +
         std::string(kExample) + "\n";
}

// kvstratad(1) in man(7): the options of `app`, every key of the configuration, and the tables.
std::string DaemonManualPage(const CLI::App& app) {
  std::string out =
      ".TH KVSTRATAD 1 \"\" \"kvstrata " + std::string(DaemonVersion()) +
      "\"\n.SH NAME\nkvstratad \\- memory tier for the KV caches of language models\n"
      ".SH SYNOPSIS\n.B kvstratad\n[OPTIONS]\n.SH DESCRIPTION\n"
      "Keeps keys and values of prompts for the engines that attach to it, in memory "
      "of GPUs and of the host, and on disk. Nothing is required. It tells its socket "
      "when it serves.\n.SH OPTIONS\n";
  out += OptionParagraphs(app);
  out += ".SH CONFIGURATION\n" + Roff(kVariables) +
         "A flag comes before the environment, that before the files, these before the default.\n" +
         KeyParagraphs();
  out += ".SH FILES\n" + Paragraphs(kFiles) + ".SH SIGNALS\n" + Paragraphs(kSignals) +
         ".SH EXIT STATUS\n";
  for (const ExitCodeRow& row : kExitCodes) {
    out += RoffParagraph(std::to_string(row.code) + " " + std::string(row.name), row.examples);
  }
  return out + ".SH EXAMPLES\n.nf\n" + Roff(kExample) + "\n.fi\n.SH SEE ALSO\n.BR kvstrata (1)\n";
}

}  // namespace
}  // namespace kvstrata

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
