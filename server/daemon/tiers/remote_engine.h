// SPDX-License-Identifier: Apache-2.0
// RemoteEngine: what differs between the engines of a remote tier, beyond that each is a ValueTier:
// which servers it has, and what is told of them. One file each, listed in config/remote_engines.h.
//
// Thread-safety: all methods, from any thread. Blocking: Ping, until its deadline at most.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/config/config.h"
#include "server/rpc/calls/grpc_options.h"
#include "server/tier/redis/redis_threads.h"
#include "server/tier/redis/redis_value_tier.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

class RemoteEngine {
 public:
  virtual ~RemoteEngine() = default;

  // Its own; as long as it lives.
  virtual ValueTier* values() = 0;
  // What was counted of each server.
  virtual std::vector<RemoteShardInfo> Shards() const = 0;
  // A sign of life of each server; `values` and `held` are left at 0.
  virtual std::vector<RemoteServerInfo> Ping(Deadline deadline) = 0;
  // The `address` in Shards and Ping of who has that value; "": not known.
  virtual std::string ServerOf(std::string_view key, std::string_view place) const = 0;
  // The servers that nodes announce themselves in. UNIMPLEMENTED: it keeps no list of nodes.
  virtual Result<std::shared_ptr<RedisThreads>> Announcements() const {
    return Unimplemented("REMOTE_ANNOUNCE",
                         "the remote tier's engine keeps no list of nodes; ask "
                         "each node for itself, or share through remote.redis");
  }
};

// What Redis gets of keys remote.*; without remote.redis no servers.
RedisTierOptions RedisOptionsOf(const RemoteConfig& config);

}  // namespace kvstrata
