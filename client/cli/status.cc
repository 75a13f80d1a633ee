// SPDX-License-Identifier: Apache-2.0
// status, health, version: is it there, what does it hold, which build is it.
#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <span>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"
#include "client/cli/quota_table.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

constexpr Column kStatusRecord[] = {
    {"VERSION", "/version"},
    {"PID", "/pid"},
    {"SOCKET", "/socket"},
    {"HEALTH", "/health"},
    {"UPTIME", "/uptime_us", Microseconds},
    {"BACKEND", "/backend"},
    {"SESSIONS", "/sessions"},
    {"SEQUENCES", "/sequences"},
    {"MODELS", "/models"},
    {"PREFIX-PAGES", "/prefix_pages"},
    {"PREFIX-HIT-RATE", "/hit_rate", Percent},
    {"TABLES-PUBLISHED", "/publications"},
    {"AWAITING-READERS", "/retired_bytes", Bytes},
    {"RECOMPRESSIONS", "/recompressions"},
    {"RECOMPRESSIONS-FAILED", "/recompress_failures"},
    {"EXTENTS-WRITTEN", "/recompressed_bytes", Bytes},
    {"RAW-PAGES-RELEASED", "/released_bytes", Bytes},
};
// The last ones are of plans with a codec: zeros where none was used.
constexpr size_t kOfCodecs = 4;
constexpr Column kPools[] = {
    {"POOL", "/tier"},
    {"DEVICE", "/device", nullptr, false, 4},
    {"USED", "/used_bytes", Bytes, true, 2},
    {"CACHED", "/cached_bytes", Bytes, true, 1},
    {"CAPACITY", "/capacity_bytes", Bytes, true, 2},
    {"FAILURE", "/failure", nullptr, false, 3, 12},
};

constexpr Column kDisks[] = {
    {"DISK", "/path", nullptr, false, 4, 12},        {"USED", "/used_bytes", Bytes, true, 2},
    {"CAPACITY", "/capacity_bytes", Bytes, true, 2}, {"ENTRIES", "/entries", nullptr, true, 1},
    {"DEGRADED", "/degraded", OrDash, false, 3, 32},
};

constexpr Column kRemoteHealth[] = {
    {"REMOTE", "/servers", nullptr, false, 4, 12},   {"SHARDS", "/shard_count", nullptr, true, 3},
    {"LEFT-ALONE", "/left_alone", nullptr, true, 2}, {"READ", "/read", nullptr, true, 1},
    {"WRITTEN", "/written", nullptr, true, 1},       {"ILLNESS", "/illness", OrDash, false, 3, 36},
    {"SECRET", "/secret_fingerprint", OrDash},
};

constexpr Column kRoomHealth[] = {
    {"CHUNKS-OF", "/user", nullptr, false, 4},
    {"USED", "/used_bytes", Bytes, true, 2},
    {"CAPACITY", "/capacity_bytes", Bytes, true, 2},
    {"LEASED", "/leased_bytes", Bytes, true, 2},
    {"SHOWN", "/shown", nullptr, true, 1},
    {"ENGINES", "/engines", nullptr, true, 2},
    {"RESTING", "/resting", nullptr, true, 2},
    {"HITS", "/hits", nullptr, true, 1},
    {"MISSES", "/misses", nullptr, true, 1},
    {"STORED", "/stored", nullptr, true, 1},
    {"READ", "/read", nullptr, true, 1},
    {"EVICTED", "/evicted", nullptr, true, 1},
};

constexpr Column kRefusals[] = {{"REFUSED-BECAUSE", "/reason"}, {"TIMES", "/count", nullptr, true}};

// A table leaves out what is off.
std::span<const Column> RecordOf(const Style& style, const v1::GetStatusResponse& status) {
  const bool off = status.recompressions() == 0 && status.recompress_failures() == 0;
  const std::span<const Column> all = kStatusRecord;
  return off && style.IsTable() ? all.first(all.size() - kOfCodecs) : all;
}

void PrintDisks(const Style& style, const Json& document) {
  if (!document["disks"].empty())
    PrintBelow(style, document, "disks", kDisks, std::cout);
  else if (style.headers)
    std::cout << "\nDISK  off: disk.path is not set\n";
}

void PrintRemotes(const Style& style, const Json& document) {
  if (document["remotes"].empty()) return;
  Json rows = {{"remotes", document["remotes"]}};
  for (Json& remote : rows["remotes"]) {
    const Json shards = remote.value("shards", Json::array());
    remote["shard_count"] = shards.size();
    remote["left_alone"] = std::ranges::count_if(
        shards, [](const Json& shard) { return shard.value("breaker_open", false); });
  }
  PrintBelow(style, rows, "remotes", kRemoteHealth, std::cout);
}

void PrintRefusals(const Style& style, const Json& document) {
  Json some = {{"refusals", Json::array()}};
  for (const Json& refusal : document["refusals"]) {
    if (refusal["count"] != 0) some["refusals"].push_back(refusal);
  }
  if (some["refusals"].empty() || !style.headers) return;
  PrintBelow(style, some, "refusals", kRefusals, std::cout);
}

Result<int> ShowStatus(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest()));
  Json document = ToJson(answer);
  document["hit_rate"] = nullptr;
  if (answer.lookup_tokens() > 0) {
    document["hit_rate"] = static_cast<double>(answer.lookup_hit_tokens()) /
                           static_cast<double>(answer.lookup_tokens());
  }
  PrintRecord(options.style, document, RecordOf(options.style, answer), std::cout);
  if (options.style.IsTable()) {
    PrintBelow(options.style, document, "pools", kPools, std::cout);
    PrintDisks(options.style, document);
    PrintRemotes(options.style, document);
    if (!document["chunk_rooms"].empty()) {  // else no engine has come
      PrintBelow(options.style, document, "chunk_rooms", kRoomHealth, std::cout);
    }
    PrintCgroups(options.style, document, std::cout);
    PrintUsersAtLimits(options.style, document, std::cout);
    PrintRefusals(options.style, document);
  }
  return kOk;
}

constexpr Column kHealth[] = {{"STATE", "/state"}, {"WHY", "/why", OrDash}, {"GRPC", "/health"}};

// Parts whose loss leaves a daemon that serves with less.
constexpr const char* kParts[] = {"kvstrata.pool.device", "kvstrata.pool.host", "kvstrata.disk",
                                  "kvstrata.remote"};

// Whether what grpc.health.v1 calls so serves; true of what the daemon has not.
using Serves = std::function<Result<bool>(const std::string& name)>;

// The state of a daemon that serves: "serving", "serving, draining the disk", "degraded: NAMES".
Result<std::string> StateBy(const Serves& serves) {
  std::string lost;
  for (const char* part : kParts) {
    KVS_ASSIGN_OR_RETURN(const bool well, serves(part));
    if (!well) lost += (lost.empty() ? "" : ", ") + std::string(part);
  }
  if (!lost.empty()) return "degraded: " + lost;
  KVS_ASSIGN_OR_RETURN(const bool writes, serves("kvstrata.disk.writes"));
  return std::string(writes ? "serving" : "serving, draining the disk");
}

// What everybody may know, which is as it was within the last second: also "not serving".
Result<std::string> StateOf(Connection* connection, const std::string& health) {
  if (health != "SERVING") return std::string("not serving");
  return StateBy([connection](const std::string& name) -> Result<bool> {
    const auto answer = connection->Health(name);
    if (!answer.ok() && answer.status().code() == Code::kNotFound) return true;
    if (!answer.ok()) return answer.status();
    return *answer == "SERVING";
  });
}

// What an operator is told besides, of one moment: it replaces `state`, which may be older.
Status AskWhy(Connection* connection, std::string* state, std::string* why) {
  const auto answer = connection->Call(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest());
  if (answer.status().code() == Code::kPermissionDenied) {
    *why = "only the daemon's own user and root see it";
  }
  if (!answer.ok()) return OkStatus();
  const auto& names = answer->health_names();
  if (names.empty() || !state->starts_with("degraded")) {  // an older daemon; one that ends
    *why = answer->health();
    return OkStatus();
  }
  KVS_ASSIGN_OR_RETURN(*state, StateBy([&names](const std::string& name) -> Result<bool> {
    const auto at = std::ranges::find(names, name, &v1::HealthName::name);
    return at == names.end() || at->serves();
  }));
  *why = state->starts_with("serving") ? "" : answer->health();
  return OkStatus();
}

// `live`: whether to restart it, which is no cure for a lost part.
Result<int> ShowHealth(const Options& options, bool quiet, bool live) {
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  KVS_ASSIGN_OR_RETURN(const std::string health, connection->Health());
  KVS_ASSIGN_OR_RETURN(std::string state, StateOf(connection.get(), health));
  std::string why;
  if (!state.starts_with("serving")) {
    KVS_RETURN_IF_ERROR(AskWhy(connection.get(), &state, &why));
  }
  const bool serving = state.starts_with("serving");
  const Json document = {{"healthy", serving}, {"health", health}, {"state", state}, {"why", why}};
  if (!quiet) PrintRecord(options.style, document, kHealth, std::cout);
  return serving || (live && health == "SERVING") ? kOk : kFailed;
}

constexpr Column kVersion[] = {{"CLIENT", "/client"},
                               {"ABI", "/abi"},
                               {"TRANSPORT", "/transport"},
                               {"DAEMON", "/daemon"},
                               {"COMMIT", "/commit"}};

Result<int> ShowVersion(const Options& options) {
  Json document = {{"client", kvs_version()},
                   {"abi", kvs_abi_version()},
                   {"transport", kvs_transport()},
                   {"daemon", nullptr},
                   {"commit", nullptr}};
  // A version is wanted with and without a daemon.
  const auto answer = Ask(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest());
  if (answer.ok()) {
    document["daemon"] = answer->version();
    document["commit"] = answer->commit();
  }
  PrintRecord(options.style, document, kVersion, std::cout);
  return kOk;
}

}  // namespace

void AddStatus(CLI::App& app, Invocation& invocation) {
  Shows(app.add_subcommand("status", "What the daemon is and holds"), invocation, ShowStatus);
  auto quiet = std::make_shared<bool>(false), live = std::make_shared<bool>(false);
  CLI::App* health = app.add_subcommand(
      "health", "Exit 0 if the daemon is well, 1 if it is degraded or does not serve");
  health->add_flag("-q,--quiet", *quiet, "Print nothing, only exit");
  health->add_flag("--live", *live,
                   "Exit 0 as long as a restart would not help: when degraded too");
  Runs(health, invocation, ShowHealth, quiet, live);
  Runs(app.add_subcommand("version", "Versions of this program, the library and the daemon"),
       invocation, ShowVersion);
}

}  // namespace kvstrata::cli
