// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/client/slot_watch.h"

#include <algorithm>
#include <utility>

namespace kvstrata::redis {
namespace {

constexpr std::chrono::milliseconds kSoon{100}, kSettling{1000}, kDownPause{250};

bool HasReplicas(const SlotMap& map) {
  return std::ranges::none_of(map.shards,
                              [](const RedisShard& shard) { return shard.replicas.empty(); });
}

}  // namespace

std::vector<RedisAddress> SlotWatch::Servers() const {
  std::vector<RedisAddress> all;
  if (map_ != nullptr) {
    for (const RedisShard& shard : map_->shards) all.push_back(shard.master);
    for (const RedisShard& shard : map_->shards) {
      all.insert(all.end(), shard.replicas.begin(), shard.replicas.end());
    }
  }
  for (const RedisAddress& server : options_.servers) {
    if (std::ranges::count(all, server) == 0) all.push_back(server);
  }
  return all;
}

bool SlotWatch::Names(const RedisAddress& server) const {
  return std::ranges::count(Servers(), server) != 0;
}

bool SlotWatch::IsMaster(const RedisAddress& server) const {
  if (map_ == nullptr) return Names(server);
  return std::ranges::count(map_->shards, server, &RedisShard::master) != 0;
}

bool SlotWatch::Lists(const RedisAddress& server) const {
  if (map_ == nullptr) return Names(server);
  return IsMaster(server) || std::ranges::any_of(map_->shards, [&](const RedisShard& shard) {
           return std::ranges::count(shard.replicas, server) != 0;
         });
}

size_t SlotWatch::unserved() const {
  if (map_ == nullptr) return 0;
  return static_cast<size_t>(std::ranges::count(map_->shard_of, SlotMap::kNobody));
}

RedisAddress SlotWatch::Begin(Time now) {
  const std::vector<RedisAddress> all = Servers();
  asking_ = true;
  began_ = now;
  return all[turn_++ % all.size()];
}

Result<SlotMap> SlotWatch::MapOf(const RedisOp& op) const {
  KVS_RETURN_IF_ERROR(op.status);
  const RespReply& reply = op.replies.front();
  if (reply.kind != RespReply::Kind::kError) {
    KVS_ASSIGN_OR_RETURN(SlotMap map, SlotMap::Parse(reply, *op.at));
    if (map.shards.empty()) return Unavailable("REDIS_SLOT", "the cluster serves no slot yet");
    return map;
  }
  // "ERR This instance has cluster support disabled", or a server that knows no clusters.
  const bool alone = reply.text.find("cluster support disabled") != std::string::npos ||
                     reply.text.find("unknown command") != std::string::npos;
  if (!alone) return Unavailable("REDIS_REFUSED", "CLUSTER SLOTS: " + reply.text.substr(0, 200));
  if (options_.servers.size() == 1) return SlotMap::Single(*op.at);
  return Unavailable("REDIS_REFUSED", op.at->ToString() +
                                          " is no cluster's, and several servers are named; name "
                                          "one, or set cluster-enabled yes");
}

bool SlotWatch::End(const RedisOp& op, Time now) {
  asking_ = false;
  Result<SlotMap> map = MapOf(op);
  if (!map.ok()) {
    why_ = map.status();
    const size_t servers = Servers().size();
    const bool all = ++failures_ % servers == 0;
    down_ |= all;
    due_ = all ? now + kDownPause : now;
    return false;
  }
  failures_ = 0;
  down_ = false;
  why_ = OkStatus();
  const bool settled = !map->clustered || HasReplicas(*map);
  due_ =
      now + (settled ? options_.refresh_interval : std::min(options_.refresh_interval, kSettling));
  map_ = std::make_shared<const SlotMap>(std::move(*map));
  return true;
}

void SlotWatch::Soon(Time now) { due_ = std::min(due_, std::max(now, began_ + kSoon)); }

void SlotWatch::Learn(const Redirection& to) {
  if (map_ == nullptr) return;
  SlotMap map = *map_;
  const auto it =
      std::ranges::find_if(map.shards, [&](const RedisShard& one) { return one.master == to.to; });
  const auto shard = static_cast<uint16_t>(it - map.shards.begin());
  if (map.shard_of[to.slot] == shard) return;
  if (it == map.shards.end()) map.shards.push_back({to.to, {}});
  map.shard_of[to.slot] = shard;
  map_ = std::make_shared<const SlotMap>(std::move(map));
}

}  // namespace kvstrata::redis
