// SPDX-License-Identifier: Apache-2.0
// explain NAME: what the reason of an error or an event of the log means, and what to do, from the
// tables of both; no daemon.
#include <algorithm>
#include <cctype>
#include <iostream>
#include <memory>
#include <vector>

#include "client/cli/invocation.h"
#include "client/cli/spelling.h"
#include "proto/events.h"
#include "proto/reasons.h"

namespace kvstrata::cli {
namespace {

constexpr Column kList[] = {{"REASON", "/reason"},
                            {"AREA", "/area", nullptr, false, 1},
                            {"MEANING", "/meaning", nullptr, false, 2, 24}};
constexpr Column kRecord[] = {
    {"REASON", "/reason"}, {"AREA", "/area"}, {"MEANING", "/meaning"}, {"NEXT", "/next", OrDash}};
constexpr Column kEvent[] = {{"EVENT", "/reason"},
                             {"LEVEL", "/level"},
                             {"MEANING", "/meaning"},
                             {"FIELDS", "/fields", OrDash}};

Json ToJson(const Reason& reason) {
  return {{"reason", reason.name},
          {"area", NameOf(reason.area)},
          {"meaning", reason.meaning},
          {"next", reason.next}};
}

Json ToJson(const EventKind& event) {
  return {{"reason", event.name},      {"area", "event"},      {"meaning", event.meaning},
          {"next", "kvstrata events"}, {"level", event.level}, {"fields", event.fields}};
}

std::string Upper(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

// Those whose name begins so, whatever the case, or else have it within; the one that is called so
// stands alone.
Json Named(const std::string& name) {
  const std::string wanted = Upper(name);
  Json found = Json::array(), within = Json::array(), exact = Json::array();
  const auto take = [&](const auto& row) {
    const std::string own = Upper(std::string(row.name));
    if (own.starts_with(wanted)) found.push_back(ToJson(row));
    if (own.find(wanted) != own.npos) within.push_back(ToJson(row));
    // A reason and an event that are called alike differ in case.
    if (own == wanted && (exact.empty() || row.name == name)) exact = Json::array({ToJson(row)});
  };
  for (const Reason& reason : AllReasons()) take(reason);
  for (const EventKind& event : AllEvents()) take(event);
  if (!exact.empty()) return exact;
  return found.empty() ? within : found;
}

Status Unknown(const std::string& name) {
  const std::string wanted = Upper(name);
  std::vector<std::string> names;
  for (const Reason& reason : AllReasons()) names.emplace_back(reason.name);
  for (const EventKind& event : AllEvents()) names.push_back(Upper(std::string(event.name)));
  std::string nearest(Nearest(wanted, std::vector<std::string_view>(names.begin(), names.end())));
  if (!FindReason(nearest)) {
    std::ranges::transform(nearest, nearest.begin(),
                           [](unsigned char c) { return std::tolower(c); });
  }
  return NotFound("REASON_UNKNOWN",
                  "no reason or event '" + name + "' among " + std::to_string(names.size()) +
                      (nearest.empty() ? "" : "; did you mean '" + nearest + "'?"));
}

Result<int> Explain(const Options& options, const std::string& name) {
  Json document = {{"reasons", Named(name)}};
  Json& found = document["reasons"];
  if (found.empty()) return Unknown(name);
  if (found.size() > 1) {
    PrintList(options.style, document, "reasons", kList, std::cout);
    return kOk;
  }
  if (found[0].contains("level")) {
    PrintRecord(options.style, found[0], kEvent, std::cout);
  } else {
    PrintRecord(options.style, found[0], kRecord, std::cout);
  }
  return kOk;
}

}  // namespace

void AddExplain(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand(
      "explain", "What the reason of an error, or an event, means, and what to do");
  auto name = std::make_shared<std::string>();
  noun->add_option(
      "NAME", *name,
      "Such as POOL_EXHAUSTED or value_lost; a beginning, or else a part, lists those that have it "
      "(default: all)");
  Runs(noun, invocation, [&invocation, name] { return Explain(invocation.options, *name); });
}

}  // namespace kvstrata::cli
