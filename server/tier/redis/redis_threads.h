// SPDX-License-Identifier: Apache-2.0
// RedisThreads: a RedisClient and the threads of the tiers that share it. Thread-safety: all
// methods, from any thread; Leave not from one of its own.
#ifndef KVSTRATA_SERVER_TIER_REDIS_REDIS_THREADS_H_
#define KVSTRATA_SERVER_TIER_REDIS_REDIS_THREADS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/tier/redis/client/redis_client.h"

namespace kvstrata {

// RedisSurvey: what the masters say of their memory (INFO), asked at intervals, so that who wants
// to know never waits. A master that does not answer keeps its last figures until the map of slots
// names it no more.
//
// Ownership: its ops hold it. Thread-safety: any thread. Cost: one small reply of each master an
// interval.

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

class RedisThreads {
 public:
  RedisThreads(redis::RedisClientOptions options, uint32_t workers,
               std::chrono::milliseconds survey_interval);
  ~RedisThreads();

  redis::RedisClient& client() { return client_; }
  const RedisSurvey& survey() const { return *survey_; }
  // In a worker; in the order in which they come, but several at a time.
  void Later(std::function<void()> work) KVS_EXCLUDES(mu_);

  // A tier begins to use it, and no longer does. The last one that leaves stops the client, whose
  // ops end, and waits for the threads.
  void Join() KVS_EXCLUDES(mu_);
  void Leave() KVS_EXCLUDES(mu_);

 private:
  void ServeClient();
  void ServeWork() KVS_EXCLUDES(mu_);
  void Stop() KVS_EXCLUDES(mu_);

  redis::RedisClient client_;
  const std::shared_ptr<RedisSurvey> survey_;
  Mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_ KVS_GUARDED_BY(mu_);
  uint32_t tiers_ KVS_GUARDED_BY(mu_) = 0;
  bool stopped_ KVS_GUARDED_BY(mu_) = false;
  std::thread client_thread_;
  std::vector<std::thread> workers_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_TIER_REDIS_REDIS_THREADS_H_
