// SPDX-License-Identifier: Apache-2.0
// The daemon's configuration: one table of keys (docs/configuration.md), never required.
//
// Precedence: flag > environment (KVSTRATA_*) > files (TOML; config_files.h) > default. Every entry
// remembers where its value comes from. Everything is checked here, before anything starts, and all
// mistakes are told at once; doctor.h holds it against the machine. `kvstratad
// --check-config` and a start agree.
//
// Values; thread-safe. Errors (INVALID_ARGUMENT unless said): CONFIG_KEY (unknown, with the nearest
// known one), CONFIG_VALUE (names key, value, where it was given, what is allowed), CONFIG_SYNTAX
// (file, line, column), CONFIG_FILE (NOT_FOUND or PERMISSION_DENIED), the PLAN_* of a named plan,
// and what DiskTier::Check returns.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/attach/attach_server.h"
#include "server/http/http_address.h"
#include "server/memory/numa_topology.h"
#include "server/store/options/user_limits.h"
#include "server/store/store.h"
#include "server/telemetry/log.h"
#include "server/tier/disk/disk_tier.h"
#include "server/tier/disk/disk_value_tier.h"
#include "server/tier/mooncake/mooncake_agent_options.h"
#include "server/tier/redis/client/redis_socket.h"
#include "server/work/mover.h"
#include "server/work/recompress.h"
#include "server/work/tiers/tier_row.h"

namespace kvstrata {

inline constexpr std::string_view kDefaultConfigFile = "/etc/kvstrata/kvstratad.toml";

// The devices whose memory the device pools are, each with a pool of its own.
struct PoolDevices {
  uint32_t emulated = 1;           // so many, in memory of the host; 0: GPUs
  std::vector<std::string> uuids;  // names of the GPUs; empty: all that are visible
};

// What `kvstrata config show` prints.
struct ConfigEntry {
  std::string key, value;
  std::string origin;  // "default", "file", "environment" or "flag"
  std::string where;   // "FILE:3:1" (line, column), the variable's name; "": origin says it
  std::string description;
  bool reloads = false;  // config_reload.h applies it
};

// A limit as it is given: a number, or a share of the pool that it limits, however large that is.
struct LimitSetting {
  uint64_t value = 0;    // 0: no limit
  uint32_t percent = 0;  // 0: `value` counts
};

// The remote tier: where it is, and what is kept there.
struct RemoteConfig {
  bool on() const { return !servers.empty(); }

  // By the name of the engine that has some: HOST:PORT of one at least, a comma between them. Of
  // several engines CheckRemoteEngine lets one through.
  std::map<std::string, std::string, std::less<>> servers;
  MooncakeAgentOptions agent;  // no master: it is not that
  std::string secret_file, seal, tenant;
  std::string user, password_file;  // for the servers' ACL; "": the default user, no password
  redis::RedisTlsOptions tls;
  std::chrono::microseconds ttl{};  // lifetime of a value there
  std::string announce;             // HOST:PORT, where other nodes ask this one; "": nowhere
  TierRowOptions pages = TierRowOptions::Far();
};

struct ConfigSources {
  std::string file;  // --config; "": default_file, if it exists; conf.d beside it, if that exists
  std::string default_file{kDefaultConfigFile};
  std::map<std::string, std::string> environment;
  std::vector<std::pair<std::string, std::string>> flags;  // key, value; the last one wins
  uid_t uid = 0;                                           // for the default socket path
};

struct Config {
  std::string socket;           // PATH
  mode_t socket_directory = 0;  // make PATH's directory with this mode if it is missing; 0: do not
  int64_t socket_group = -1;    // gid of both sockets; -1: the daemon's own
  StoreOptions store;
  std::string device;  // pool.device as it was given
  PoolDevices devices;
  HostNuma host_numa;
  AttachOptions attach;
  uint64_t chunk_bytes = 0;             // room for engines' chunks; 0: none are kept
  uint32_t chunk_layout_percent = 100;  // part of them that rows of one size may have
  WorkOptions work;
  DiskTierOptions disk;  // no directory: no disk tier
  std::chrono::microseconds disk_start_timeout{60'000'000};
  DiskValueTierOptions disk_values;
  TierRowOptions tier_pages;
  RemoteConfig remote;
  MoverOptions mover;
  std::string backend;   // backend of the remote transport; a name of kernels/backend/backend.h
  uint32_t threads = 0;  // for its ops; 0: all cores
  std::chrono::microseconds shutdown_timeout{4'000'000};
  std::chrono::microseconds shutdown_write_timeout{20'000'000};
  std::chrono::microseconds patience{2'000'000};  // with a loop, until health tells that it hangs
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
  bool coredump = false;
  HttpAddress http;                      // kNone: nothing is served
  std::string http_listen;               // http.listen as it was given
  std::string trace_endpoint;            // "": spans go nowhere
  std::map<Limit, LimitSetting> limits;  // for every user that has none of its own
  std::map<std::string, std::map<Limit, LimitSetting>> user_limits;

  ConfigSources sources;              // that it was read from
  std::vector<std::string> files;     // that were read, in this order
  std::vector<ConfigEntry> entries;   // every key, in the order of the documentation, then tables
  std::vector<std::string> warnings;  // environment variables: nearly a key, or above a file
};

// KVSTRATA_* and XDG_RUNTIME_DIR of this process.
std::map<std::string, std::string> ReadEnvironment();

// "key=value" of --set.
Result<std::pair<std::string, std::string>> ParseSetting(std::string_view text);

struct LoadedConfig {
  Config config;                 // a key with a mistake has its default
  std::vector<Status> mistakes;  // in the order in which they were found
  bool complete = true;          // false: a file could not be read, nothing else was looked at
};
LoadedConfig ReadConfig(const ConfigSources& sources);

// A mistake that names keys, with the places where they were given before it.
Status Located(const Status& mistake, const Config& config);
// The text with control characters as \xNN: one line, whatever a value holds.
std::string OneLine(std::string_view text);
// Code and reason of the first; a line for each, "REASON: text" of the others, without control
// characters. REQUIRES: some.
Status Joined(std::span<const Status> mistakes);

}  // namespace kvstrata
