// SPDX-License-Identifier: Apache-2.0
// RedisValueTier::PingAndWait: a sign of life of each server, at once.
#include <algorithm>
#include <future>
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

// Until the servers have told of each other, or none of them does. An op on a slot waits for just
// that; what becomes of it does not matter.
void AwaitTopology(const RedisTierParts& parts, Deadline deadline) {
  if (parts.threads->client().Topology() != nullptr) return;
  auto op = std::make_unique<RedisOp>();
  op->request =
      std::make_shared<const redis::RedisRequest>(std::initializer_list<std::string_view>{"PING"});
  op->deadline = deadline;
  const auto ended = std::make_shared<std::promise<void>>();
  op->done = [ended](RedisOp&) { ended->set_value(); };
  parts.threads->client().Submit(std::move(op));
  ended->get_future().wait();
}

class PingRound : public std::enable_shared_from_this<PingRound> {
 public:
  PingRound(RedisParts parts, std::vector<RedisPing> pings, Deadline deadline)
      : parts_(std::move(parts)), deadline_(deadline), pings_(std::move(pings)) {}

  std::vector<RedisPing> Run() KVS_NO_THREAD_SAFETY_ANALYSIS {
    left_ = pings_.size();
    for (size_t i = 0; i < pings_.size(); ++i) Send(i, false);
    std::unique_lock lock(mu_.native());
    ended_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return left_ == 0; });
    return std::move(pings_);
  }

 private:
  // The first may have to connect; the second one's time is told.
  void Send(size_t i, bool second) {
    auto op = std::make_unique<RedisOp>();
    op->request = std::make_shared<const redis::RedisRequest>(
        std::initializer_list<std::string_view>{"PING"});
    op->at = pings_[i].server;
    op->deadline = deadline_;
    op->done = [self = shared_from_this(), i, second, sent = Clock::now()](RedisOp& ended) {
      const Status status = StatusOf(ended, redis::RespReply::Kind::kText);
      if (status.ok() && !second) return self->Send(i, true);
      self->Ended(i, status, Clock::now() - sent);
    };
    parts_->threads->client().Submit(std::move(op));
  }
  void Ended(size_t i, Status status, Clock::duration took) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (status.ok()) {
      pings_[i].round_trip = std::chrono::ceil<std::chrono::microseconds>(took);
    }
    pings_[i].status = std::move(status);
    if (--left_ == 0) ended_.notify_all();
  }

  const RedisParts parts_;
  const Deadline deadline_;
  Mutex mu_;
  std::condition_variable ended_;
  std::vector<RedisPing> pings_;  // each written by its own op's end
  size_t left_ KVS_GUARDED_BY(mu_) = 0;
};

}  // namespace

std::vector<RedisPing> RedisValueTier::PingAndWait(Deadline deadline) {
  const Deadline now = Clock::now();
  AwaitTopology(*parts_, now + (deadline - now) / 2);
  return std::make_shared<PingRound>(parts_, ServersOf(*parts_), deadline)->Run();
}

std::string RedisValueTier::ServerOf(std::string_view key, std::string_view place) const {
  return MasterOf(*parts_, key, place);
}

}  // namespace kvstrata
