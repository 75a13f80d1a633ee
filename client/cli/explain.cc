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

constexpr Column kReasonList[] = {{"REASON", "/reason"},
                                  {"AREA", "/area", nullptr, false, 1},
                                  {"MEANING", "/meaning", nullptr, false, 2, 24}};
constexpr Column kReasonRecord[] = {
    {"REASON", "/reason"}, {"AREA", "/area"}, {"MEANING", "/meaning"}, {"NEXT", "/next", OrDash}};
constexpr Column kEvent[] = {{"EVENT", "/reason"},
                             {"LEVEL", "/level"},
                             {"MEANING", "/meaning"},
                             {"FIELDS", "/fields", OrDash}};

Json RowJson(const Reason& reason) {
  return {{"reason", reason.name},
          {"area", NameOf(reason.area)},
          {"meaning", reason.meaning},
          {"next", reason.next}};
}

Json RowJson(const EventKind& event) {
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
    if (own.starts_with(wanted)) found.push_back(RowJson(row));
    if (own.find(wanted) != own.npos) within.push_back(RowJson(row));
    // A reason and an event that are called alike differ in case.
    if (own == wanted && (exact.empty() || row.name == name)) exact = Json::array({RowJson(row)});
  };
  for (const Reason& reason : AllReasons()) take(reason);
  for (const EventKind& event : AllEvents()) take(event);
  if (!exact.empty()) return exact;
  return found.empty() ? within : found;
}

// Those whose name begins with `wanted`'s first word, as REDIS_ of REDIS_AUTH; none for one word.
std::vector<std::string> SameBeginning(const std::string& wanted,
                                       const std::vector<std::string>& names) {
  std::vector<std::string> same;
  const std::string begin = wanted.substr(0, wanted.find('_') + 1);
  for (const std::string& name : names) {
    if (!begin.empty() && Upper(name).starts_with(begin)) same.push_back(name);
  }
  return same;
}

// A typing error has one name that was meant; of a name that was guessed its first word is right.
Status Unknown(const std::string& name) {
  constexpr size_t kTypingErrors = 2;
  const std::string wanted = Upper(name);
  std::vector<std::string> names, upper;
  for (const Reason& reason : AllReasons()) names.emplace_back(reason.name);
  for (const EventKind& event : AllEvents()) names.emplace_back(event.name);
  for (const std::string& own : names) upper.push_back(Upper(own));
  const std::vector<std::string_view> views(upper.begin(), upper.end());
  const std::string_view nearest = Nearest(wanted, views);
  std::string text = "no reason or event '" + name + "' among " + std::to_string(names.size());
  const std::vector<std::string> same = SameBeginning(wanted, names);
  if (!nearest.empty() && (same.empty() || EditDistance(nearest, wanted) <= kTypingErrors)) {
    const auto at = std::ranges::find(views, nearest) - views.begin();
    text += "; did you mean '" + names[static_cast<size_t>(at)] + "'?";
  } else if (!same.empty()) {
    text += "; of the same beginning are";
    for (const std::string& own : same) text += (&own == same.data() ? " " : ", ") + own;
  }
  return NotFound("REASON_UNKNOWN", text);
}

Result<int> Explain(const Options& options, const std::string& name) {
  Json document = {{"reasons", Named(name)}};
  Json& found = document["reasons"];
  if (found.empty()) return Unknown(name);
  if (found.size() > 1) {
    PrintList(options.style, document, "reasons", kReasonList, std::cout);
    return kOk;
  }
  if (found[0].contains("level")) {
    PrintRecord(options.style, found[0], kEvent, std::cout);
  } else {
    PrintRecord(options.style, found[0], kReasonRecord, std::cout);
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
  Runs(noun, invocation, Explain, name);
}

}  // namespace kvstrata::cli
