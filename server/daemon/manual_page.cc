// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/manual_page.h"

#include <span>
#include <string_view>

#include "base/roff.h"
#include "server/config/config_keys.h"
#include "server/daemon/daemon.h"

namespace kvstrata {
namespace {

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
     "A clean end, exit code 0, whatever clients do; after shutdown.timeout exit code 1."},
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
    out += RoffParagraph(std::string(key.name) + ", " + std::string(key.environment), meaning);
  }
  return out;
}

}  // namespace

std::string HelpFooter() {
  std::string codes;
  for (const ExitCodeRow& row : kExitCodes) {
    codes += (codes.empty() ? "" : ", ") + std::to_string(row.code) + " " + std::string(row.name);
  }
  return std::string(kVariables) + "Exit codes: " + codes + ".\nExample:\n  " +
         std::string(kExample) + "\n";
}

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

}  // namespace kvstrata
