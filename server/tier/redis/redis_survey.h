// SPDX-License-Identifier: Apache-2.0
// RedisSurvey: what the masters say of their memory (INFO), asked at intervals, so that who wants
// to know never waits. A master that does not answer keeps its last figures until the map of slots
// names it no more.
//
// Ownership: its ops hold it. Thread-safety: any thread. Cost: one small reply of each master an
// interval.
#ifndef KVSTRATA_SERVER_TIER_REDIS_REDIS_SURVEY_H_
#define KVSTRATA_SERVER_TIER_REDIS_REDIS_SURVEY_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/sync.h"
#include "server/tier/redis/client/redis_client.h"

namespace kvstrata {

// Figures of one master, or of all.
struct RedisMemory {
  uint64_t capacity_bytes = 0;  // its limit; 0: it has none
  uint64_t used_bytes = 0;      // by keys and values
  uint64_t entries = 0;
  uint64_t evicted = 0;  // since the server's start
};
// For the text that INFO gives.
RedisMemory ParseInfo(std::string_view info);

class RedisSurvey : public std::enable_shared_from_this<RedisSurvey> {
 public:
  RedisSurvey(redis::RedisClient* client, std::chrono::milliseconds interval)
      : client_(*client), interval_(interval) {}

  using Time = std::chrono::steady_clock::time_point;
  // Begins one if it is time.
  void RunIfDue() KVS_EXCLUDES(mu_);
  Time due() const KVS_EXCLUDES(mu_);  // max while one runs
  RedisMemory total() const KVS_EXCLUDES(mu_);
  // For the master with the least room; 0: none has a limit, or it is not known.
  uint64_t least_capacity() const KVS_EXCLUDES(mu_);
  uint64_t ended() const KVS_EXCLUDES(mu_);

 private:
  void Ended(const redis::RedisOp& op, const redis::RedisAddress& master) KVS_EXCLUDES(mu_);

  redis::RedisClient& client_;
  const std::chrono::milliseconds interval_;
  mutable Mutex mu_;
  std::map<redis::RedisAddress, RedisMemory> masters_ KVS_GUARDED_BY(mu_);
  size_t asked_ KVS_GUARDED_BY(mu_) = 0;  // masters that owe an answer
  uint64_t ended_ KVS_GUARDED_BY(mu_) = 0;
  std::chrono::steady_clock::time_point due_ KVS_GUARDED_BY(mu_){};
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_TIER_REDIS_REDIS_SURVEY_H_
