// SPDX-License-Identifier: Apache-2.0
// events: what happened in the daemon, as in its log: the last 1,000 events, and what comes.
#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <string_view>
#include <vector>

#include "client/cli/connection.h"
#include "client/cli/event_text.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

struct WantedEvents {
  uint64_t after = 0;
  bool follow = false;
  std::string level = "debug", name;  // at least; "": any
};

constexpr std::array<std::string_view, 4> kLevels = {"debug", "info", "warning", "error"};

bool IsWanted(const WantedEvents& wanted, const v1::Event& event) {
  const auto rank = [](std::string_view level) { return std::ranges::find(kLevels, level); };
  return rank(event.level()) >= rank(wanted.level) &&
         (wanted.name.empty() || wanted.name == event.name());
}

constexpr Column kEventList[] = {{"NUMBER", "/number", nullptr, true},
                                 {"TIME", "/time", nullptr, false, 2},
                                 {"LEVEL", "/level", nullptr, false, 1},
                                 {"EVENT", "/event", nullptr, false, 4},
                                 {"DETAILS", "/fields", EventDetails, false, 3, 24}};

void PrintNext(const Style& style, const Json& event) {
  if (style.format == Format::kTable && style.width != 0) {
    std::cout << FoldedEvent(event, style.width) << std::endl;
    return;
  }
  if (style.format == Format::kYaml) std::cout << "---\n";
  if (style.format == Format::kJson) {
    std::cout << event.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n";
  } else {
    const Style rows{style.format, false, style.width};
    style.format == Format::kYaml
        ? PrintDocument(style.format, event, std::cout)
        : PrintList(rows, {{"events", {event}}}, "events", kEventList, std::cout);
  }
  std::cout.flush();
}

void WarnOfMissed(uint64_t missed) {
  if (missed == 0) return;
  std::cerr << "kvstrata: " << missed
            << " events were gone before they could be told; the daemon's log has them\n";
}

Result<int> ShowEvents(const Options& options, const WantedEvents& wanted) {
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  v1::WatchRequest request;
  request.set_after(wanted.after);
  request.set_follow(wanted.follow);
  Json document = {{"events", Json::array()}, {"missed", 0}};
  uint64_t missed = 0;
  const auto each = [&](const v1::WatchResponse& batch) {
    missed += batch.missed();
    if (wanted.follow) WarnOfMissed(batch.missed());
    for (const v1::Event& event : batch.events()) {
      if (!IsWanted(wanted, event)) continue;
      if (wanted.follow) {
        PrintNext(options.style, ToJson(event));
      } else {
        document["events"].push_back(ToJson(event));
      }
    }
  };
  const Status ended =
      connection->Stream(&v1::Admin::Stub::Watch, request, each,
                         wanted.follow ? Connection::Lasts::kForever : Connection::Lasts::kWait);
  if (!ended.ok()) return ended;
  document["missed"] = missed;
  if (options.style.format == Format::kTable && options.style.width != 0) {
    for (const Json& event : document["events"]) PrintNext(options.style, event);
  } else {
    PrintList(options.style, document, "events", kEventList, std::cout);
  }
  if (options.style.IsTable()) WarnOfMissed(missed);
  return kOk;
}

}  // namespace

void AddEvents(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand(
      "events", "What happened: refusals, operators' verbs, evictions, damage, states");
  auto wanted = std::make_shared<WantedEvents>();
  noun->add_flag("-f,--follow", wanted->follow, "Go on with what comes, until Ctrl-C");
  noun->add_option("--after", wanted->after, "Only behind the event of this number (default: all)")
      ->type_name("NUMBER");
  noun->add_option("--level", wanted->level, "Only of this level or a worse one (default: debug)")
      ->check(CLI::IsMember(std::vector<std::string>(kLevels.begin(), kLevels.end())));
  noun->add_option("--event", wanted->name, "Only events of this name")->type_name("NAME");
  Runs(noun, invocation, ShowEvents, wanted);
}

}  // namespace kvstrata::cli
