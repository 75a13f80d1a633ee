// SPDX-License-Identifier: Apache-2.0
// RedisValueTier: a ValueTier in the memory of Redis or Valkey servers, a cluster or a single one,
// that several daemons share. What a value is called and looks like there is docs/remote_format.md.
//
//   Probe   the headers of all keys (GETRANGE), pipelined to all shards at once: one round trip,
//           two where slots moved or a server failed. With a deadline in the past: what was put,
//           found or read here during the last `known_for`.
//   Get     into the caller's buffers, checked; what fails a check is unlinked and DATA_LOSS.
//           Replicas are asked for what a master refuses, or is slow to answer.
//   Put     what is there with its length is not sent again. `durable` adds nothing: servers keep
//           values in memory. With a full server that evicts nothing: RESOURCE_EXHAUSTED
//           REDIS_FULL.
//   Walk    one master after the other; servers that do not answer are left out. Values may be
//           missed while slots move or a server takes over.
// Every command counts as a use for the servers' eviction, TierGet::inspects or not.
//
// Tenants: a tier is one tenant's, by its format.
// Ownership: as ValueTier. Since a late call closes its connection, buffers are free when it ends.
// Threads: a caller who waits for a Put, Forget or Walk carries it out, and moves the bytes unless
// other calls are under way. "kvs-redis-io" moves all others, and "kvs-redis" check them, call
// `done` and carry out what nobody waits for. Thread-safety: all methods, from any thread. Cost: a
// pass over the bytes of each value besides the sockets; kGcm: a copy of what is on its way out.
//
// Errors of requests: those of RemoteFormat and RedisClient; NOT_FOUND REDIS_MISS,
// RESOURCE_EXHAUSTED REDIS_FULL, UNAVAILABLE REDIS_REFUSED (an error of the server's, REDIS_LOGIN
// for missing rights), DEADLINE_EXCEEDED REDIS_SLOW.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/tier/redis/client/redis_server.h"
#include "server/tier/redis/client/redis_socket.h"
#include "server/tier/remote/remote_format.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct RedisTierOptions {
  std::vector<std::string> servers;  // "HOST:PORT": some of a cluster's, or the only one
  std::string user;                  // "": the default user
  std::string password_file;         // its first line; "": none is asked for
  redis::RedisTlsOptions tls;
  uint32_t connections = 2;  // to a server, for probes, reads and writes each
  bool replica_reads = true;
  std::chrono::milliseconds ttl{0};  // for what is put; 0: until it is evicted
  std::chrono::milliseconds connect_timeout{1000};
  std::chrono::milliseconds stall_timeout{1000};
  std::chrono::milliseconds hedge_after{50};
  std::chrono::milliseconds refresh_interval{5000};  // for the map of slots
  std::chrono::milliseconds survey_interval{2000};   // for what Stats tells of the servers
  std::chrono::milliseconds known_for{30000};
};

class RedisThreads;
struct RedisTierParts;

// What a server says to a PING.
struct RedisPing {
  redis::RedisAddress server;
  std::string role;  // "master", "replica"; "unknown": no server has told yet
  bool breaker_open = false;
  std::chrono::microseconds round_trip{0};  // that of one on an open connection
  Status status;
};

class RedisValueTier final : public ValueTier {
 public:
  // Reads the files, connects to nothing: servers may come later. INVALID_ARGUMENT REDIS_ADDRESS,
  // REDIS_TLS, REDIS_PASSWORD.
  static Result<std::unique_ptr<RedisValueTier>> Open(const RedisTierOptions& options,
                                                      remote::RemoteFormat format);
  // What Open would refuse; opens nothing.
  static Status Check(const RedisTierOptions& options);
  // Ends what it holds.
  ~RedisValueTier() override;

  void Probe(std::span<TierProbe> probes, TierCall call) override;
  void Get(std::span<TierGet> gets, TierCall call) override;
  void Put(std::span<TierPut> puts, TierCall call) override;
  void Forget(std::span<TierForget> keys, TierCall call) override;
  void Walk(TierWalk* walk, TierCall call) override;
  // Capacity, use, entries and evictions are those of all masters as of the last survey.
  TierStats Stats() const override;

  std::vector<redis::RedisServerStats> Servers() const;
  // redis_ping.cc. All servers at once, those with an open breaker too; waits until the deadline at
  // most, of which half for the servers to tell of each other. Not in a thread of the tier's.
  std::vector<RedisPing> PingAndWait(Deadline deadline);
  // The master that a value belongs to, "host:port"; "": not known.
  std::string ServerOf(std::string_view key, std::string_view place) const;
  // Its client and threads, for others who Join them.
  std::shared_ptr<RedisThreads> threads() const;

 private:
  explicit RedisValueTier(std::shared_ptr<RedisTierParts> parts);
  std::string WritesIllness() const;

  const std::shared_ptr<RedisTierParts> parts_;  // calls in flight hold it, too
};

}  // namespace kvstrata
