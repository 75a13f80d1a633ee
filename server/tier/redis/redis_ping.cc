// SPDX-License-Identifier: Apache-2.0
// RedisValueTier::PingAndWait: a sign of life of each server, at once.
#include <algorithm>
#include <utility>

#include "server/tier/redis/redis_calls.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
using redis::RedisOp;

// The servers that the map names; before there is one, those of the configuration.
std::vector<RedisPing> ServersOf(const RedisTierParts& parts) {
  std::vector<RedisPing> pings;
  if (const auto map = parts.threads->client().Topology()) {
    for (const redis::RedisShard& shard : map->shards) {
      pings.push_back({shard.master, "master", false, {}, {}});
      for (const redis::RedisAddress& replica : shard.replicas)
        pings.push_back({replica, "replica", false, {}, {}});
    }
  } else {
    for (const std::string& server : parts.options.servers) {
      const Result<redis::RedisAddress> address = redis::ParseRedisAddress(server);
      if (address.ok()) pings.push_back({*address, "unknown", false, {}, {}});
    }
  }
  for (const redis::RedisServerStats& known : parts.threads->client().Servers()) {
    for (RedisPing& ping : pings) ping.breaker_open |= known.open && known.address == ping.server;
  }
  std::ranges::sort(pings, {}, &RedisPing::server);
  return pings;
}

std::unique_ptr<RedisOp> NewPing(Deadline deadline) {
  auto op = std::make_unique<RedisOp>();
  op->request =
      std::make_shared<const redis::RedisRequest>(std::initializer_list<std::string_view>{"PING"});
  op->deadline = deadline;
  return op;
}

// The first may have to connect; the second one's time is told.
void Send(RedisOps* ops, RedisPing* ping, Deadline deadline, bool second) {
  auto op = NewPing(deadline);
  op->at = ping->server;
  ops->Submit(std::move(op), [=, sent = Clock::now()](const RedisOp& ended) {
    ping->status = StatusOf(ended, redis::RespReply::Kind::kText);
    if (!ping->status.ok()) return;
    if (!second) return Send(ops, ping, deadline, true);
    ping->round_trip = std::chrono::ceil<std::chrono::microseconds>(Clock::now() - sent);
  });
}

}  // namespace

std::vector<RedisPing> RedisValueTier::PingAndWait(Deadline deadline) {
  RedisOps ops(parts_->threads.get());
  const Deadline now = Clock::now();
  // Until the servers have told of each other, or none of them does. An op on a slot waits for just
  // that; what becomes of it does not matter.
  if (parts_->threads->client().Topology() == nullptr) ops.Ask(NewPing(now + (deadline - now) / 2));
  std::vector<RedisPing> pings = ServersOf(*parts_);
  for (RedisPing& ping : pings) Send(&ops, &ping, deadline, false);
  while (!ops.empty()) ops.Handle(true);
  return pings;
}

std::string RedisValueTier::ServerOf(std::string_view key, std::string_view place) const {
  return MasterOf(*parts_, key, place);
}

}  // namespace kvstrata
