// SPDX-License-Identifier: Apache-2.0
// __names KIND: what completions ask the daemon for, one name a line. Nobody waits long for a
// completion, nor reads an error of one.
#include <algorithm>
#include <iostream>
#include <memory>

#include "client/cli/arguments.h"
#include "client/cli/completion.h"
#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr std::chrono::milliseconds kPatience{300};
constexpr uint32_t kMostValues = 200;

using Names = Result<std::vector<std::string>>;

template <auto kMethod, typename Request>
Names Listed(const Options& options, const char* rows, const char* field) {
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, kMethod, Request()));
  std::vector<std::string> names;
  const Json document = ToJson(answer);
  for (const Json& row : document.at(rows)) {
    const Json& name = row.at(field);
    names.push_back(name.is_string() ? name.get<std::string>() : name.dump());
  }
  return names;
}

Names ValueKeys(const Options& options, const char*, const char*) {
  v1::ListValuesRequest request;
  request.set_limit(kMostValues);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::ListValues, request));
  std::vector<std::string> names;
  for (const v1::Value& value : answer.values()) {
    names.push_back(ValueKeyText(value.key()));
  }
  return names;
}

Names Limits(const Options& options, const char* rows, const char*) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::ListQuotas, v1::ListQuotasRequest()));
  std::vector<std::string> names;
  const Json document = ToJson(answer);
  for (const auto& [limit, value] : document.at(rows).items()) names.push_back(limit);
  return names;
}

struct Kind {
  const char* name;
  Names (*list)(const Options& options, const char* rows, const char* field);
  const char* rows;
  const char* field;
};
constexpr Kind kKinds[] = {
    {"sequences", Listed<&v1::Admin::Stub::ListSequences, v1::ListSequencesRequest>, "sequences",
     "sequence"},
    {"sessions", Listed<&v1::Admin::Stub::ListSessions, v1::ListSessionsRequest>, "sessions",
     "session"},
    {"models", Listed<&v1::Control::Stub::ListModels, v1::ListModelsRequest>, "models", "name"},
    {"plans", Listed<&v1::Control::Stub::ListPlans, v1::ListPlansRequest>, "plans", "name"},
    {"pins", Listed<&v1::Admin::Stub::ListPins, v1::ListPinsRequest>, "pins", "pin"},
    {"devices", Listed<&v1::Admin::Stub::ListPools, v1::ListPoolsRequest>, "pools", "device"},
    {"users", Listed<&v1::Admin::Stub::ListQuotas, v1::ListQuotasRequest>, "users", "user"},
    {"limits", Limits, "defaults", ""},
    {"values", ValueKeys, "", ""},
    {"engines", Listed<&v1::Admin::Stub::ListEngineRecalls, v1::ListEngineRecallsRequest>,
     "engines", "engine"},
    {"settings", Listed<&v1::Admin::Stub::GetConfig, v1::GetConfigRequest>, "entries", "key"},
};

struct Taker {
  std::string_view option, kind;
};
constexpr Taker kTakers[] = {
    {"SEQ", "sequences"},      {"--seq", "sequences"}, {"--recall", "sequences"},
    {"--session", "sessions"}, {"MODEL", "models"},    {"--model", "models"},
    {"PLAN", "plans"},         {"--plan", "plans"},    {"PIN", "pins"},
    {"--device", "devices"},   {"USER", "users"},      {"--tenant", "users"},
    {"LIMIT", "limits"},       {"KEY", "values"},      {"--key", "values"},
    {"--engine", "engines"},
};

std::vector<std::string> KindNames() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

Result<int> Print(Options options, const std::string& name) {
  if (!options.timeout_given) options.timeout = kPatience;
  const auto* const kind =
      std::ranges::find_if(kKinds, [&name](const Kind& k) { return k.name == name; });
  KVS_ASSIGN_OR_RETURN(const auto names, kind->list(options, kind->rows, kind->field));
  for (const std::string& one : names) {
    if (!one.empty()) std::cout << Printable(one) << "\n";
  }
  return kOk;
}

}  // namespace

std::string_view LiveKindOf(const CLI::Option& option) {
  const auto* const taker = std::ranges::find(kTakers, option.get_name(), &Taker::option);
  return taker == std::end(kTakers) ? "" : taker->kind;
}

void AddNames(CLI::App& app, Invocation& invocation) {
  CLI::App* verb = app.add_subcommand("__names", "Names that the daemon has now")->group("");
  auto kind = std::make_shared<std::string>();
  verb->add_option("KIND", *kind, "Which")->required()->check(CLI::IsMember(KindNames()));
  Runs(verb, invocation, Print, kind);
}

}  // namespace kvstrata::cli
