// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/redis_survey.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kTimeout{1000};

// The number behind "\nFIELD:", or 0.
uint64_t FieldOf(std::string_view info, std::string_view field) {
  const std::string name = "\n" + std::string(field) + ":";
  const size_t at = info.find(name);
  if (at == std::string_view::npos) return 0;
  const char* const begin = info.data() + at + name.size();
  uint64_t number = 0;
  (void)std::from_chars(begin, info.data() + info.size(), number);
  return number;
}

}  // namespace

RedisMemory ParseInfo(std::string_view info) {
  RedisMemory memory;
  memory.capacity_bytes = FieldOf(info, "maxmemory");
  memory.evicted = FieldOf(info, "evicted_keys");
  if (const size_t keys = info.find("\ndb0:keys="); keys != std::string_view::npos) {
    const char* const begin = info.data() + keys + 10;
    (void)std::from_chars(begin, info.data() + info.size(), memory.entries);
  }
  // Without a value the server still counts its own tables as data.
  if (memory.entries != 0) memory.used_bytes = FieldOf(info, "used_memory_dataset");
  return memory;
}

void RedisSurvey::RunIfDue() {
  std::shared_ptr<const redis::SlotMap> map;
  {
    MutexLock lock(mu_);
    if (asked_ != 0 || due_ > Clock::now()) return;
    map = client_.Topology();
    due_ = Clock::now() + interval_;
    if (map == nullptr) return;
    asked_ = map->shards.size();
    std::erase_if(masters_, [&](const auto& known) {
      return std::ranges::none_of(
          map->shards, [&](const redis::RedisShard& shard) { return shard.master == known.first; });
    });
  }
  const auto request =
      std::make_shared<const redis::RedisRequest>(std::initializer_list<std::string_view>{"INFO"});
  for (const redis::RedisShard& shard : map->shards) {
    auto op = std::make_unique<redis::RedisOp>();
    op->request = request;
    op->at = shard.master;
    op->deadline = Clock::now() + kTimeout;
    op->done = [self = shared_from_this(), master = shard.master](redis::RedisOp& ended) {
      self->Ended(ended, master);
    };
    client_.Submit(std::move(op));
  }
}

void RedisSurvey::Ended(const redis::RedisOp& op, const redis::RedisAddress& master) {
  const bool told = op.status.ok() && op.replies.front().kind == redis::RespReply::Kind::kBulk;
  MutexLock lock(mu_);
  if (told) masters_[master] = ParseInfo(op.replies.front().text);
  if (--asked_ == 0) ++ended_;
}

RedisSurvey::Time RedisSurvey::due() const {
  MutexLock lock(mu_);
  return asked_ != 0 ? Time::max() : due_;
}

RedisMemory RedisSurvey::total() const {
  MutexLock lock(mu_);
  RedisMemory sum;
  for (const auto& [address, memory] : masters_) {
    sum.capacity_bytes += memory.capacity_bytes;
    sum.used_bytes += memory.used_bytes;
    sum.entries += memory.entries;
    sum.evicted += memory.evicted;
  }
  return sum;
}

uint64_t RedisSurvey::least_capacity() const {
  MutexLock lock(mu_);
  uint64_t least = 0;
  for (const auto& [address, memory] : masters_) {
    if (memory.capacity_bytes == 0) continue;
    least = least == 0 ? memory.capacity_bytes : std::min(least, memory.capacity_bytes);
  }
  return least;
}

uint64_t RedisSurvey::ended() const {
  MutexLock lock(mu_);
  return ended_;
}

}  // namespace kvstrata
