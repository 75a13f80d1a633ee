// SPDX-License-Identifier: Apache-2.0
// RedisThreads: a RedisClient and the threads of the tiers that share it. Who waits for ops of its
// own (RedisOps) serves the client meanwhile, unless others have ops there, too: then, and while
// nobody waits, a thread of these does. Thread-safety: all methods, from any thread; Leave not from
// one of its own.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/sync.h"
#include "server/tier/call_queue.h"
#include "server/tier/call_threads.h"
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
  RedisThreads(redis::RedisClientOptions options, std::chrono::milliseconds survey_interval);
  ~RedisThreads();

  redis::RedisClient& client() { return client_; }
  const RedisSurvey& survey() const { return *survey_; }
  // In a worker; in the order in which they come, but several at a time.
  void Later(std::function<void()> work) KVS_EXCLUDES(mu_);
  // One lane: calls that wait for their ops and whose callers do not wait.
  CallQueue& calls() { return calls_; }

  // A tier begins to use it, and no longer does. The last one that leaves stops the client, whose
  // ops end, and waits for the threads.
  void Join() KVS_EXCLUDES(mu_);
  void Leave() KVS_EXCLUDES(mu_);

 private:
  friend class RedisOps;

  void ServeClient() KVS_EXCLUDES(mu_);
  // Handles what happened to the client's sockets.
  void Work();
  // The client's own thread is to serve it.
  bool Unwaited() const KVS_REQUIRES(mu_) { return waiting_ == 0 || client_.ops() > awaited_; }
  // What who waits for ops does once: serves the client, or sees that another one does and waits
  // for that. Not `waits`: looks, and waits for nothing.
  void ServeOnce(std::unique_lock<std::mutex>* lock, bool waits) KVS_REQUIRES(mu_);
  void ServeWork() KVS_EXCLUDES(mu_);
  void Stop() KVS_EXCLUDES(mu_);

  redis::RedisClient client_;
  const std::shared_ptr<RedisSurvey> survey_;
  Mutex mu_;
  std::condition_variable changed_;
  std::condition_variable unserved_, served_;  // for the client's thread; for those that wait
  bool serving_ KVS_GUARDED_BY(mu_) = false;   // one serves the client
  size_t waiting_ KVS_GUARDED_BY(mu_) = 0;     // RedisOps
  size_t awaited_ KVS_GUARDED_BY(mu_) = 0;     // ops of theirs that have not ended
  std::deque<std::function<void()>> work_ KVS_GUARDED_BY(mu_);
  uint32_t tiers_ KVS_GUARDED_BY(mu_) = 0;
  bool stopped_ KVS_GUARDED_BY(mu_) = false;
  std::thread client_thread_;
  std::array<std::thread, 2> workers_;
  CallQueue calls_{1};
  std::optional<CallThreads> callers_;
};

// Ops whose ends are handled by the thread that waits for them. Thread-safety: none. The end waits
// for those that are under way, and handles them no more.
class RedisOps {
 public:
  using Handler = std::function<void(redis::RedisOp& ended)>;

  // `cancel`: theirs.
  explicit RedisOps(RedisThreads* threads, const std::stop_token& cancel = {});
  ~RedisOps();

  void Submit(std::unique_ptr<redis::RedisOp> op, Handler handler);
  // One alone, as it ended. REQUIRES: empty.
  redis::RedisOp Ask(std::unique_ptr<redis::RedisOp> op);
  // Calls handlers of what has ended; `waits`: until something has.
  void Handle(bool waits);
  // That have not been handled.
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  using List = std::list<std::pair<redis::RedisOp, Handler>>;
  struct Wake {
    RedisThreads* threads;
    void operator()() const { threads->client().WakeUp(); }
  };

  RedisThreads& threads_;
  size_t size_ = 0;
  List under_way_ KVS_GUARDED_BY(threads_.mu_), ended_ KVS_GUARDED_BY(threads_.mu_);
  const std::stop_callback<Wake> on_cancel_;
};

}  // namespace kvstrata
