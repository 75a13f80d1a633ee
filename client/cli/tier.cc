// SPDX-License-Identifier: Apache-2.0
// tier ls|show|scrub|drain|resize: what is below memory.
#include <algorithm>
#include <iostream>
#include <memory>
#include <thread>

#include "client/cli/arguments.h"
#include "client/cli/connection.h"
#include "client/cli/event_text.h"
#include "client/cli/invocation.h"
#include "client/cli/terminal.h"

namespace kvstrata::cli {
namespace {

std::string Errors(const Json& row) {
  const auto count = [&row](const char* key) { return row.value(key, uint64_t{0}); };
  return std::to_string(count("corrupt") + count("io_errors") + count("deadlines"));
}

// For a row: what keeps the disk from being all that it could be, the worst first.
std::string Degraded(const Json& row) {
  if (!row.value("breaker_open", false)) return OrDash(row.value("degraded", Json()));
  return "left alone, tried again in " + Microseconds(row.value("retry_us", Json(0)));
}

// When it was, and what.
std::string LastError(const Json& row) {
  const std::string what = OrDash(row.value("last_error", Json()));
  const int64_t at_us = row.value("last_error_time_us", int64_t{0});
  return at_us == 0 ? "-" : TimeText(at_us) + " " + what;
}

std::string LeftAlone(const Json& row) {
  if (!row.value("breaker_open", false)) return "no";
  return "since " + TimeText(row.value("left_alone_since_us", int64_t{0})) + ", tried again in " +
         Microseconds(row.value("retry_us", Json(0)));
}

// Whether it takes and has all: who drains it wants to see that first.
std::string State(const Json& row) {
  if (row.value("draining", false)) return "draining";
  return Degraded(row) == "-" ? "serving" : "degraded";
}

constexpr Column kTierList[] = {
    {"PATH", "/path", nullptr, false, 0, 12},
    {"STATE", "", State, false, 7},
    {"QUEUE", "/queue"},
    {"CAPACITY", "/capacity_bytes", Bytes, true, 5},
    {"USED", "/used_bytes", Bytes, true, 5},
    {"ENTRIES", "/entries", nullptr, true, 4},
    {"WAITING", "/waiting", nullptr, true, 3},
    {"WRITTEN", "/written", nullptr, true, 1},
    {"READ", "/read", nullptr, true, 1},
    {"DROPPED", "/dropped", nullptr, true, 6},
    {"ERRORS", "", Errors, true, 6},
    {"DEGRADED", "", Degraded, false, 8, 32},
};

std::string Unwritten(const Json& row) {
  const auto count = [&row](const char* key) { return row.value(key, uint64_t{0}); };
  return std::to_string(count("dropped_full") + count("dropped_rate") + count("dropped_local") +
                        count("dropped_stop") + count("gone") + count("failed"));
}

// "3", or "1 of 3 left alone".
std::string Shards(const Json& row) {
  const Json shards = row.value("shards", Json::array());
  const auto open = std::count_if(shards.begin(), shards.end(), [](const Json& shard) {
    return shard.value("breaker_open", false);
  });
  const std::string all = std::to_string(shards.size());
  return open == 0 ? all : std::to_string(open) + " of " + all + " left alone";
}

// "3 opens, 5 values", which the rates of tenants or of the node cut.
std::string OverRate(const Json& row) {
  const auto opens = row.value("over_rate", uint64_t{0});
  const auto values = row.value("dropped_rate", uint64_t{0});
  if (opens == 0 && values == 0) return "-";
  return std::to_string(opens) + " opens, " + std::to_string(values) + " values";
}

constexpr Column kRemoteList[] = {
    {"SERVERS", "/servers", nullptr, false, 0, 12},
    {"ENGINE", "/engine", nullptr, false, 3},
    {"SHARDS", "", Shards, false, 6},
    {"WRITE", "/write", nullptr, false, 4},
    {"SEARCHES", "/searches", nullptr, true, 3},
    {"FOUND", "/found", nullptr, true, 2},
    {"READ", "/read", nullptr, true, 1},
    {"MISSED", "/missed", nullptr, true, 2},
    {"WAITING", "/waiting", nullptr, true, 3},
    {"WRITTEN", "/written", nullptr, true, 1},
    {"UNWRITTEN", "", Unwritten, true, 7},
    {"OVER-RATE", "", OverRate, false, 5},
    {"ILLNESS", "/illness", OrDash, false, 8, 32},
    {"SECRET", "/secret_fingerprint", OrDash},
};

constexpr Column kRoomList[] = {
    {"CHUNKS-OF", "/user"},
    {"CAPACITY", "/capacity_bytes", Bytes, true, 5},
    {"USED", "/used_bytes", Bytes, true, 5},
    {"LEASED", "/leased_bytes", Bytes, true, 4},
    {"SHOWN", "/shown", nullptr, true, 4},
    {"ENGINES", "/engines", nullptr, true, 3},
    {"HITS", "/hits", nullptr, true, 2},
    {"MISSES", "/misses", nullptr, true, 2},
    {"ARRIVED", "/arrived", nullptr, true, 1},
    {"STORED", "/stored", nullptr, true, 2},
    {"EVICTED", "/evicted", nullptr, true, 1},
    {"WRITTEN", "/written", nullptr, true, 1},
    {"READ", "/read", nullptr, true, 1},
    {"CHANGED", "/changed", nullptr, true, 6},
};

constexpr Column kOverRates[] = {
    {"OVER-ITS-RATE", "/user"},
    {"CLUSTER-TENANT", "/cluster_tenant", OrDash},
    {"OPENS-CUT", "/opens", nullptr, true},
    {"VALUES-LEFT", "/values", nullptr, true},
};

// Beside a table; nothing where nobody was.
void PrintOverRates(const Style& style, const Json& document) {
  Json users = {{"users", Json::array()}};
  for (const Json& remote : document.at("remotes")) {
    for (const Json& user : remote.at("over_rates")) users["users"].push_back(user);
  }
  if (!style.headers || users["users"].empty()) return;
  PrintBelow(style, users, "users", kOverRates, std::cout);
}

Result<int> ListTiers(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest()));
  const Json status = ToJson(answer);
  const Json document = {{"tiers", status.at("disks")},
                         {"remotes", status.at("remotes")},
                         {"rooms", status.at("chunk_rooms")}};
  // A document has all; else they are lists, whose columns differ.
  const bool whole = options.style.IsDocument();
  bool behind = false;
  const auto list = [&](const char* rows, std::span<const Column> columns, bool always) {
    if (!always && document.at(rows).empty()) return;
    if (behind && options.style.format != Format::kName) std::cout << "\n";
    PrintList(options.style, document, rows, columns, std::cout);
    behind = true;
  };
  const bool none = answer.remotes().empty() && answer.chunk_rooms().empty();
  list("tiers", kTierList, whole || none);
  if (whole) return kOk;
  list("remotes", kRemoteList, false);
  if (!answer.remotes().empty()) PrintOverRates(options.style, document);
  list("rooms", kRoomList, false);
  return kOk;
}

constexpr Column kTierRecord[] = {
    {"PATH", "/path"},
    {"QUEUE", "/queue"},
    {"O_DIRECT", "/direct", YesNo},
    {"DEGRADED", "/degraded", OrDash},
    {"LEFT-ALONE", "", LeftAlone},
    {"STOPPED-SEGMENTS", "/stopped_segments"},
    {"CAPACITY", "/capacity_bytes", Bytes},
    {"USED", "/used_bytes", Bytes},
    {"ENTRIES", "/entries"},
    {"WAITING", "/waiting"},
    {"WRITTEN", "/written"},
    {"ALREADY-GONE", "/gone"},
    {"DROPPED-QUEUE-FULL", "/dropped"},
    {"FAILED", "/failed"},
    {"EVICTED", "/evicted"},
    {"READ", "/read"},
    {"LATE-LOADS", "/late_loads"},
    {"REFUSED-LOADS", "/refused_loads"},
    {"CORRUPT", "/corrupt"},
    {"IO-ERRORS", "/io_errors"},
    {"DEADLINES", "/deadlines"},
    {"LAST-ERROR", "", LastError},
    {"DRAINING", "/draining", YesNo},
    {"REFUSED-DRAINING", "/refused"},
};

Result<int> ShowTier(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest()));
  if (answer.disks().empty()) {
    return NotFound("TIER_UNKNOWN", "the daemon has no disk tier: disk.path is not set");
  }
  PrintRecord(options.style, ToJson(answer.disks(0)), kTierRecord, std::cout);
  return kOk;
}

constexpr Column kScrubbed[] = {
    {"VALUES", "/values"}, {"BYTES", "/bytes", Bytes}, {"CORRUPT", "/corrupt"},
    {"NOT-READ", "/late"}, {"ORPHANS", "/orphans"},
};

Result<int> Scrub(const Options& options, uint64_t rate) {
  v1::ScrubRequest request;
  request.set_bytes_per_second(rate);
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  const ProgressLine progress;
  v1::ScrubResponse last;
  const Status ended = connection->Stream(
      &v1::Admin::Stub::Scrub, request,
      [&](const v1::ScrubResponse& response) {
        last = response;
        const auto cut = [](uint64_t n) {
          return static_cast<int32_t>(std::min<uint64_t>(n, INT32_MAX));
        };
        progress("values read", cut(response.values()), cut(response.entries()));
      },
      options.timeout_given ? Connection::Lasts::kTimeout : Connection::Lasts::kForever);
  progress.Clear();
  // What was found before it ended early is worth its lines too.
  if (last.done() || last.values() > 0) {
    PrintRecord(options.style, ToJson(last), kScrubbed, std::cout);
  }
  if (!ended.ok()) return ended;
  return last.corrupt() == 0 ? kOk : kFailed;
}

constexpr Column kDrained[] = {
    {"DRAINING", "/draining", YesNo},
    {"SAFE-TO-STOP", "/drained", YesNo},
    {"ENTRIES", "/entries"},
    {"REFUSED", "/refused"},
};

// The daemon answers at once: it is asked until nothing waits any more.
Result<int> Drain(const Options& options, bool resume) {
  constexpr std::chrono::milliseconds kAskAgain{20};
  v1::DrainRequest request;
  request.set_resume(resume);
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  const auto end = std::chrono::steady_clock::now() + options.timeout;
  for (;;) {
    KVS_ASSIGN_OR_RETURN(const auto answer, connection->Call(&v1::Admin::Stub::Drain, request));
    if (resume || answer.drained()) {
      PrintRecord(options.style, ToJson(answer), kDrained, std::cout);
      return kOk;
    }
    if (std::chrono::steady_clock::now() >= end) {
      return Status(Code::kDeadlineExceeded, "DRAIN_DEADLINE",
                    std::to_string(answer.waiting()) +
                        " values wait to be written, or the checkpoint is not done; the disk takes "
                        "no new ones meanwhile");
    }
    std::this_thread::sleep_for(kAskAgain);
  }
}

constexpr Column kResized[] = {
    {"TIER", "/tier"},
    {"CAPACITY", "/capacity_bytes", Bytes},
    {"TAKEN", "/taken_bytes", Bytes},
    {"BEYOND-CAPACITY", "/beyond_bytes", Bytes},
    {"EVICTED", "/evicted"},
    {"RESTART-TAKES", "/key"},
};

Result<int> Resize(const Options& options, const std::string& tier, const std::string& device,
                   uint64_t bytes) {
  v1::ResizeRequest request;
  request.set_tier(tier);
  request.set_bytes(bytes);
  request.set_device(device);
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  const auto answer = connection->Call(&v1::Admin::Stub::Resize, request);
  if (!answer.ok()) return GoesOn(answer.status(), "RESIZE_DEADLINE");
  Json document = ToJson(*answer);
  document["beyond_bytes"] =
      answer->taken_bytes() - std::min(answer->taken_bytes(), answer->capacity_bytes());
  PrintRecord(options.style, document, kResized, std::cout);
  return kOk;
}

}  // namespace

void AddTier(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("tier", "Tiers: the disk below memory, and what nodes share");
  Shows(noun->add_subcommand("ls", "What the disk and the remote tier hold and failed at, and why"),
        invocation, ListTiers);
  Shows(noun->add_subcommand("show", "All of the disk tier's state and counters"), invocation,
        ShowTier);

  CLI::App* scrub = noun->add_subcommand(
      "scrub", "Read and check every value on disk; exit 1 when something was corrupt");
  auto rate = std::make_shared<uint64_t>(0);
  scrub
      ->add_option_function<std::string>(
          "--rate", [rate](const std::string& text) { *rate = ParseBytes(text); },
          "At most so many bytes a second, such as 200MiB (default: as fast as the disk)")
      ->type_name("BYTES");
  Runs(scrub, invocation, Scrub, rate);

  CLI::App* drain = noun->add_subcommand(
      "drain", "Take no new values to disk, write what waits, and say when it is safe to stop");
  auto resume = std::make_shared<bool>(false);
  drain->add_flag("--resume", *resume,
                  "Take values again, and what memory has and the disk has not");
  Runs(drain, invocation, Drain, resume);

  CLI::App* resize = noun->add_subcommand(
      "resize", "Change the capacity of the disk, or of a pool, until the daemon ends");
  auto bytes = std::make_shared<uint64_t>(0);
  auto tier = std::make_shared<std::string>("disk");
  resize
      ->add_option_function<std::string>(
          "SIZE", [bytes](const std::string& text) { *bytes = ParseBytes(text); },
          "What the configuration's key would say, such as 64GiB")
      ->required();
  resize->add_option("--tier", *tier, "Which (default: disk)")
      ->check(CLI::IsMember({"device", "host", "disk"}));
  auto device = std::make_shared<std::string>();
  resize->add_option("--device", *device,
                     "With --tier device: of this one, as pool ls names it (default: of each)");
  Runs(resize, invocation, Resize, tier, device, bytes);
  AddRemoteTier(*noun, invocation);
}

}  // namespace kvstrata::cli
