// SPDX-License-Identifier: Apache-2.0
// config show|check|reload: what the daemon runs with, whether a file would be accepted, and having
// the daemon read its files again.
//
// The configuration's parser is the daemon's; a file is checked by running `kvstratad
// --check-config` from beside this program or from PATH, so that there is one truth.
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/daemon_program.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr Column kConfigList[] = {{"KEY", "/key"},
                                  {"VALUE", "/value", nullptr, false, 4, 24},
                                  {"ORIGIN", "/origin", nullptr, false, 3},
                                  {"WHERE", "/where", OrDash, false, 2},
                                  {"DESCRIPTION", "/description", nullptr, false, 1}};
constexpr Column kChecked[] = {{"FILE", "/file"}, {"VALID", "/valid"}, {"OUTPUT", "/output"}};

std::string Effect(const Json& needs_restart) {
  return needs_restart.get<bool>() ? "needs a restart" : "applied";
}
std::string EffectToBe(const Json& needs_restart) {
  return needs_restart.get<bool>() ? "needs a restart" : "would apply";
}

Result<int> Reload(const Options& options, bool dry_run) {
  v1::ReloadConfigRequest request;
  request.set_dry_run(dry_run);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::ReloadConfig, request));
  if (options.style.IsTable() && answer.changes().empty()) {
    std::cout << "no key changed\n";
    return kOk;
  }
  const Column columns[] = {{"KEY", "/key"},
                            {"BEFORE", "/before", OrDash, false, 1, 8},
                            {"AFTER", "/after", OrDash, false, 3, 12},
                            {"EFFECT", "/needs_restart", dry_run ? EffectToBe : Effect, false, 4},
                            {"WHERE", "/where", OrDash, false, 2}};
  PrintList(options.style, ToJson(answer), "changes", columns, std::cout);
  return kOk;
}

Result<int> Check(const Options& options, const std::string& file) {
  KVS_ASSIGN_OR_RETURN(
      Finished finished,
      RunChild({DaemonProgram(), "--config", file, "--check-config"}, options.timeout));
  const bool valid = finished.exit_code == 0;
  if (options.style.IsTable()) {
    (valid ? std::cout : std::cerr) << finished.output;
  } else {
    while (finished.output.ends_with('\n')) finished.output.pop_back();
    PrintRecord(options.style, {{"file", file}, {"valid", valid}, {"output", finished.output}},
                kChecked, std::cout);
  }
  return valid ? kOk : kFailed;
}

}  // namespace

void AddConfig(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("config", "Configuration of the daemon");
  Runs(noun->add_subcommand("show", "Every key, its value and where it comes from"), invocation,
       Lists(&v1::Admin::Stub::GetConfig, "entries", kConfigList));
  auto dry_run = std::make_shared<bool>(false);
  CLI::App* reload = noun->add_subcommand(
      "reload", "Have the daemon read its files again and apply what can change while it runs");
  reload->add_flag("--dry-run", *dry_run, "Only tell what would change");
  Runs(reload, invocation, Reload, dry_run);
  auto file = std::make_shared<std::string>();
  CLI::App* check = noun->add_subcommand("check", "Whether a daemon would start with this file");
  check->add_option("FILE", *file, "TOML")->required();
  Runs(check, invocation, Check, file);
}

}  // namespace kvstrata::cli
