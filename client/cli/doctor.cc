// SPDX-License-Identifier: Apache-2.0
// doctor: whether kvstratad would start on this machine and do well, check by check, with the fix
// of each that it would not. Runs `kvstratad --check-config --deep`, so that there is one truth.
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/daemon_program.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr Column kChecks[] = {{"CHECK", "/check"},
                              {"VERDICT", "/verdict"},
                              {"REASON", "/reason"},
                              {"WHAT", "/what"},
                              {"FIX", "/fix"}};

struct WantedChecks {
  std::string file;
  std::vector<std::string> settings;
};

constexpr std::chrono::milliseconds kTimeout{30'000};  // silent servers have some seconds each

// The document of `text`, which may end anywhere behind "checks":[: then of the checks that are
// whole, and not healthy. Discarded: there is none.
Json DocumentOf(const std::string& text) {
  const auto parse = [](const std::string& whole) {
    return Json::parse(whole, nullptr, /*allow_exceptions=*/false);
  };
  Json document = parse(text);
  for (size_t end = text.rfind('}'); document.is_discarded() && end != text.npos && end > 0;
       end = text.rfind('}', end - 1)) {
    document = parse(text.substr(0, end + 1) + "],\"healthy\":false}");
  }
  return document;
}

Status ShowChecks(const Style& style, const std::string& text) {
  if (style.IsTable()) {
    std::cout << text;
    return OkStatus();
  }
  const Json document = DocumentOf(text);
  if (document.is_discarded()) {
    return FailedPrecondition("RPC_UNIMPLEMENTED", "kvstratad does not know --deep: " + text +
                                                       "; install both programs from one release");
  }
  PrintList(style, document, "checks", kChecks, std::cout);
  return OkStatus();
}

// What was found before the time was up is shown, too.
Result<int> Examine(const Options& options, bool socket_given, const WantedChecks& wanted) {
  std::vector<std::string> command = {DaemonProgram(), "--check-config", "--deep"};
  if (!wanted.file.empty()) command.insert(command.end(), {"--config", wanted.file});
  if (socket_given) command.insert(command.end(), {"--socket", options.socket});
  for (const std::string& setting : wanted.settings) {
    command.insert(command.end(), {"--set", setting});
  }
  if (!options.style.IsTable()) command.insert(command.end(), {"-o", "json"});
  std::string unfinished;
  const auto finished =
      RunChild(std::move(command), options.timeout_given ? options.timeout : kTimeout, &unfinished);
  if (!finished.ok()) {
    if (!unfinished.empty()) (void)ShowChecks(options.style, unfinished);
    return finished.status();
  }
  KVS_RETURN_IF_ERROR(ShowChecks(options.style, finished->output));
  return finished->exit_code == 0 ? kOk : kFailed;
}

}  // namespace

void AddDoctor(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand(
      "doctor", "Whether kvstratad would start here and do well; the fix of what is wrong");
  auto wanted = std::make_shared<WantedChecks>();
  noun->add_option("--config", wanted->file, "The daemon's TOML file (default: the daemon's)")
      ->type_name("FILE");
  noun->add_option("--set", wanted->settings, "As kvstratad's; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  const CLI::Option* socket = app.get_option("--socket");
  Runs(noun, invocation, [wanted, socket](const Options& options) {
    return Examine(options, socket->count() != 0, *wanted);
  });
}

}  // namespace kvstrata::cli
