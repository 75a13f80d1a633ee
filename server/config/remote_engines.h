// SPDX-License-Identifier: Apache-2.0
// The engines of the remote tier, a line each in KVS_REMOTE_ENGINES. All else that the
// configuration and the daemon know of engine Redis is kRedisEngine, in
// server/daemon/tiers/remote_redis.cc: its keys, what it has no use for, how it is opened. Its
// ValueTier is a folder of server/tier.
//
// Threads: constant tables and pure functions; any.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "server/config/config_keys.h"

namespace kvstrata {

namespace remote {
class RemoteFormat;  // remote_format.h
}
class RemoteEngine;  // server/daemon/tiers/remote_engine.h

struct RemoteEngineRow {
  std::string_view name;  // its servers are RemoteConfig::servers[name]
  // In the order of documents: first remote.NAME, its servers.
  std::span<const ConfigKey> keys;
  // REMOTE_ENGINE: a key remote.* that it has no use for is set. Null: it uses all.
  Status (*check)(const RemoteConfig& config);
  // Connects to nothing yet. Errors: those of its ValueTier's Open.
  Result<std::unique_ptr<RemoteEngine>> (*open)(const RemoteConfig& config,
                                                const remote::RemoteFormat& format);
};

// The order of keys in documents.
#define KVS_REMOTE_ENGINES(ENGINE) \
  ENGINE(Redis)                    \
  ENGINE(Mooncake)

#define KVS_ENGINE(Name) extern const RemoteEngineRow k##Name##Engine;
#define KVS_ENGINE_ROW(Name) &k##Name##Engine,
KVS_REMOTE_ENGINES(KVS_ENGINE)
inline constexpr const RemoteEngineRow* kRemoteEngines[] = {KVS_REMOTE_ENGINES(KVS_ENGINE_ROW)};

// For the key remote.NAME. False: there are servers, and whether they are allowed is to be seen.
bool TakeServers(std::string_view engine, std::string_view servers, Config* c);
// HOST:PORT with its port: what others are told is what is written.
bool IsNodeAddress(std::string_view text);

// "remote.redis or remote.mooncake": the keys of which one makes a remote tier.
std::string RemoteEngineKeys();

// The one that has servers. REQUIRES: config.on(), and CheckRemoteEngine found no second one.
const RemoteEngineRow& RemoteEngineOf(const RemoteConfig& config);

// REMOTE_ENGINE: the servers beside `other`, which is set, too.
Status RefusedBeside(const RemoteConfig& config, const std::string& other, const char* why);

}  // namespace kvstrata
