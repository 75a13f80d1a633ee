// SPDX-License-Identifier: Apache-2.0
// Redis or Valkey as the engine of the remote tier.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/config/config_numbers.h"
#include "server/config/remote_engines.h"
#include "server/daemon/tiers/remote_engine.h"
#include "server/telemetry/traffic.h"
#include "server/tier/redis/redis_value_tier.h"

namespace kvstrata {
namespace {

constexpr size_t kMostServers = 64;

// "HOST:PORT[,HOST:PORT...]"
std::vector<std::string> ServersIn(std::string_view text) {
  std::vector<std::string> servers;
  for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
    end = std::min(text.find(',', begin), text.size());
    servers.emplace_back(text.substr(begin, end - begin));
  }
  return servers;
}

// None of them twice.
bool AreServers(std::string_view text) {
  std::vector<redis::RedisAddress> servers;
  for (const std::string& part : ServersIn(text)) {
    const Result<redis::RedisAddress> server = redis::ParseRedisAddress(part);
    if (!server.ok() || std::ranges::find(servers, *server) != servers.end()) return false;
    servers.push_back(*server);
  }
  return servers.size() <= kMostServers;
}

constexpr ConfigKey kRedisKeys[] = {
    ConfigKey{"remote.redis", "", "HOST:PORT[,HOST:PORT...], up to 64; '': no remote tier",
              "servers of the Redis or Valkey cluster that nodes share pages through; those named "
              "tell of the others",
              KVS_READS(TakeServers("redis", v, c) || AreServers(v)), kText},
};

RemoteAnswersInfo InfoOf(const redis::RedisAnswers& a) {
  return {a.hits, a.absent, a.refused, a.late, a.lost, a.damaged};
}

RemoteShardInfo InfoOf(const redis::RedisServerStats& s) {
  RemoteShardInfo shard;
  shard.address = s.address.ToString();
  shard.last_error = s.last_error;
  shard.breaker_open = s.open;
  shard.requests = s.requests;
  shard.failures = s.failures;
  shard.timeouts = s.timeouts;
  shard.hedges = s.hedges;
  shard.openings = s.openings;
  shard.connections = s.connections;
  shard.sent_bytes = s.sent;
  shard.received_bytes = s.received;
  shard.probes = InfoOf(s.probes);
  shard.reads = InfoOf(s.reads);
  // One histogram, of which the tier must not know the other's header.
  static_assert(redis::RedisAnswerTimes::kBounds == kLatencyBounds &&
                redis::RedisAnswerTimes::BoundUs(3) == LatencyBoundUs(3));
  shard.answers.counts = s.times.counts;
  shard.answers.sum_us = s.times.sum_us;
  return shard;
}

class RedisEngine final : public RemoteEngine {
 public:
  explicit RedisEngine(std::unique_ptr<RedisValueTier> values) : values_(std::move(values)) {}

  ValueTier* values() override { return values_.get(); }
  std::vector<RemoteShardInfo> Shards() const override {
    std::vector<RemoteShardInfo> shards;
    for (const redis::RedisServerStats& s : values_->Servers()) shards.push_back(InfoOf(s));
    return shards;
  }
  std::vector<RemoteServerInfo> Ping(Deadline deadline) override {
    std::vector<RemoteServerInfo> servers;
    for (const RedisPing& ping : values_->PingAndWait(deadline)) {
      servers.push_back(
          {ping.server.ToString(), ping.role, ping.breaker_open, ping.round_trip, ping.status});
    }
    return servers;
  }
  std::string ServerOf(std::string_view key, std::string_view place) const override {
    return values_->ServerOf(key, place);
  }
  Result<std::shared_ptr<RedisThreads>> Announcements() const override {
    return values_->threads();
  }

 private:
  const std::unique_ptr<RedisValueTier> values_;
};

Result<std::unique_ptr<RemoteEngine>> OpenRedis(const RemoteConfig& config,
                                                const remote::RemoteFormat& format) {
  KVS_ASSIGN_OR_RETURN(auto values, RedisValueTier::Open(RedisOptionsOf(config), format));
  return std::unique_ptr<RemoteEngine>(new RedisEngine(std::move(values)));
}

}  // namespace

RedisTierOptions RedisOptionsOf(const RemoteConfig& config) {
  RedisTierOptions options;
  const auto servers = config.servers.find("redis");
  if (servers != config.servers.end()) options.servers = ServersIn(servers->second);
  options.user = config.user;
  options.password_file = config.password_file;
  options.tls = config.tls;
  options.ttl = std::chrono::duration_cast<std::chrono::milliseconds>(config.ttl);
  return options;
}

constinit const RemoteEngineRow kRedisEngine = {"redis", kRedisKeys, nullptr, OpenRedis};

}  // namespace kvstrata
