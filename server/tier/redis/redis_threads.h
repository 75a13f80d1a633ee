// SPDX-License-Identifier: Apache-2.0
// RedisThreads: a RedisClient and the threads of the tiers that share it. Thread-safety: all
// methods, from any thread; Leave not from one of its own.
#ifndef KVSTRATA_SERVER_TIER_REDIS_REDIS_THREADS_H_
#define KVSTRATA_SERVER_TIER_REDIS_REDIS_THREADS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/tier/redis/client/redis_client.h"
#include "server/tier/redis/redis_survey.h"

namespace kvstrata {

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
