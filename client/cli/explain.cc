// SPDX-License-Identifier: Apache-2.0
// explain REASON: what an error's reason means and what to do, from the table of reasons; no
// daemon.
#include <algorithm>
#include <cctype>
#include <iostream>
#include <memory>
#include <vector>

#include "client/cli/invocation.h"
#include "client/cli/spelling.h"
#include "proto/reasons.h"

namespace kvstrata::cli {
namespace {

constexpr Column kList[] = {{"REASON", "/reason"},
                            {"AREA", "/area", nullptr, false, 1},
                            {"MEANING", "/meaning", nullptr, false, 2, 24}};
constexpr Column kRecord[] = {
    {"REASON", "/reason"}, {"AREA", "/area"}, {"MEANING", "/meaning"}, {"NEXT", "/next", OrDash}};

Json ToJson(const Reason& reason) {
  return {{"reason", reason.name},
          {"area", NameOf(reason.area)},
          {"meaning", reason.meaning},
          {"next", reason.next}};
}

Status Unknown(const std::string& name) {
  std::vector<std::string_view> names;
  for (const Reason& reason : AllReasons()) names.push_back(reason.name);
  const std::string nearest(Nearest(name, names));
  return NotFound("REASON_UNKNOWN",
                  "no reason '" + name + "' among " + std::to_string(names.size()) +
                      (nearest.empty() ? "" : "; did you mean '" + nearest + "'?"));
}

Result<int> Explain(const Options& options, std::string name) {
  if (name.empty()) {
    Json document = {{"reasons", Json::array()}};
    for (const Reason& reason : AllReasons()) document["reasons"].push_back(ToJson(reason));
    PrintList(options.style, document, "reasons", kList, std::cout);
    return kOk;
  }
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
  const auto at = FindReason(name);
  if (!at) return Unknown(name);
  PrintRecord(options.style, ToJson(AllReasons()[*at]), kRecord, std::cout);
  return kOk;
}

}  // namespace

void AddExplain(CLI::App& app, Invocation& invocation) {
  CLI::App* noun =
      app.add_subcommand("explain", "What the reason of an error means, and what to do");
  auto name = std::make_shared<std::string>();
  noun->add_option("REASON", *name, "Such as POOL_EXHAUSTED (default: lists all)");
  Runs(noun, invocation, [&invocation, name] { return Explain(invocation.options, *name); });
}

}  // namespace kvstrata::cli
