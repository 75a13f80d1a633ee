// SPDX-License-Identifier: Apache-2.0
// log level: how much the daemon's log says, until it ends.
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr Column kLogRecord[] = {{"LEVEL", "/level"}, {"BEFORE", "/before"}};

Result<int> Level(const Options& options, const std::string& level) {
  v1::SetLogLevelRequest request;
  request.set_level(level);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::SetLogLevel, request));
  if (!options.style.IsTable()) {
    PrintRecord(options.style, ToJson(answer), kLogRecord, std::cout);
  } else if (level.empty()) {
    std::cout << answer.level() << "\n";
  } else {
    std::cout << "log.level is " << answer.level() << ", was " << answer.before()
              << "; until the daemon ends or reads another one from its files\n";
  }
  return kOk;
}

}  // namespace

void AddLog(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("log", "The daemon's log");
  auto level = std::make_shared<std::string>();
  CLI::App* verb = noun->add_subcommand(
      "level", "Show the least severe level that is written, or set it until the daemon ends");
  verb->add_option("LEVEL", *level, "trace, debug, info, warn or error");
  Runs(verb, invocation, Level, level);
}

}  // namespace kvstrata::cli
