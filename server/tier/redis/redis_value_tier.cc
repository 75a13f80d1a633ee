// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/redis_value_tier.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "server/tier/redis/redis_calls.h"
#include "server/tier/redis/redis_threads.h"

namespace kvstrata {
namespace {

Result<redis::RedisLogin> LoginOf(const RedisTierOptions& options) {
  redis::RedisLogin login;
  login.user = options.user;
  if (options.password_file.empty()) return login;
  std::ifstream file(options.password_file);
  std::getline(file, login.password);
  if (!login.password.empty() && login.password.back() == '\r') login.password.pop_back();
  if (file.fail() || login.password.empty()) {
    return InvalidArgument("REDIS_PASSWORD", "remote.password_file = '" + options.password_file +
                                                 "' has no first line, or cannot be read; write "
                                                 "the password into it, for this user to read");
  }
  return login;
}

Result<redis::RedisClientOptions> ClientOptionsOf(const RedisTierOptions& options) {
  redis::RedisClientOptions client;
  for (const std::string& server : options.servers) {
    KVS_ASSIGN_OR_RETURN(client.servers.emplace_back(), redis::ParseRedisAddress(server));
  }
  if (client.servers.empty()) {
    return InvalidArgument("REDIS_ADDRESS", "no server is named; write 10.0.0.7:6379");
  }
  KVS_ASSIGN_OR_RETURN(client.login, LoginOf(options));
  if (options.tls.on) {
    KVS_ASSIGN_OR_RETURN(client.tls, redis::RedisTls::Load(options.tls));
  }
  client.connections = std::max(options.connections, 1U);
  client.replica_reads = options.replica_reads;
  client.connect_timeout = options.connect_timeout;
  client.stall_timeout = options.stall_timeout;
  client.hedge_after = options.hedge_after;
  client.refresh_interval = options.refresh_interval;
  return client;
}

}  // namespace

Status RedisValueTier::Check(const RedisTierOptions& options) {
  return ClientOptionsOf(options).status();
}

Result<std::unique_ptr<RedisValueTier>> RedisValueTier::Open(const RedisTierOptions& options,
                                                             remote::RemoteFormat format) {
  KVS_ASSIGN_OR_RETURN(redis::RedisClientOptions client, ClientOptionsOf(options));
  auto threads = std::make_shared<RedisThreads>(std::move(client), options.survey_interval);
  return std::unique_ptr<RedisValueTier>(new RedisValueTier(
      std::make_shared<RedisTierParts>(std::move(threads), options, std::move(format))));
}

RedisValueTier::RedisValueTier(std::shared_ptr<RedisTierParts> parts) : parts_(std::move(parts)) {
  parts_->threads->Join();
}

RedisValueTier::~RedisValueTier() {
  parts_->threads->Leave();
  // Calls of this one, where another tier goes on, end by their deadlines.
  std::unique_lock<std::mutex> lock(parts_->mu.native());
  [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    parts_->ended.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return parts_->calls == 0; });
  }();
}

TierStats RedisValueTier::Stats() const {
  const RedisMemory memory = parts_->threads->survey().total();
  TierStats stats;
  {
    MutexLock lock(parts_->mu);
    stats = parts_->counted;
  }
  stats.capacity_bytes = memory.capacity_bytes;
  stats.used_bytes = memory.used_bytes;
  stats.entries = memory.entries;
  stats.evicted = memory.evicted;
  stats.illness = parts_->threads->client().Illness();
  if (stats.illness.empty()) stats.illness = WritesIllness();
  return stats;
}

// A server that is no master any more gets no writes.
std::string RedisValueTier::WritesIllness() const {
  const auto map = parts_->threads->client().Topology();
  const auto counts = [&map](const std::string& server) {
    return map != nullptr && std::ranges::any_of(map->shards, [&](const redis::RedisShard& shard) {
             return shard.master.ToString() == server;
           });
  };
  return parts_->writes.Illness(counts, std::chrono::steady_clock::now());
}

std::vector<redis::RedisServerStats> RedisValueTier::Servers() const {
  return parts_->threads->client().Servers();
}

std::shared_ptr<RedisThreads> RedisValueTier::threads() const { return parts_->threads; }

}  // namespace kvstrata
