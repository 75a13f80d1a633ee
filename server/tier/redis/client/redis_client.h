// SPDX-License-Identifier: Apache-2.0
// RedisClient: a client of a Redis or Valkey cluster, or of one such server, that nothing a server
// does can hold up.
//
// It knows which servers have which slots (CLUSTER SLOTS, at intervals and after refusals), sends
// ops to masters, follows MOVED and ASK, asks replicas for reads that a master refuses or is slow
// to answer, and leaves servers alone whose breaker is open, until a PING is answered. An op ends
// by its deadline whatever happens; its connection is closed then if it is in flight, so that its
// memory is free; others on it are sent again.
//
// Ownership: an op is the client's from Submit until its `done` has returned. Threads: the owner
// has one thread at a time serve it:
//
//     while (client.Wait()) client.Work();
//
// All else: any thread. Cost: about 1 us an op, and a system call or two. The process ignores
// SIGPIPE.
//
// Status of an op: UNAVAILABLE with REDIS_CONNECT, REDIS_TLS, REDIS_LOGIN, REDIS_CLOSED,
// REDIS_PROTOCOL, REDIS_SLOW, REDIS_DOWN (no server answers), REDIS_LEFT_ALONE (breaker),
// REDIS_SLOT (nobody serves it), REDIS_REDIRECTED (too often); TierLate, TierCancelled,
// TierStopped. A reply that is an error is OK here: whoever asked knows what it means.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/sync.h"
#include "base/unique_fd.h"
#include "server/tier/redis/client/redis_op.h"
#include "server/tier/redis/client/redis_server.h"
#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata::redis {

class RedisClient {
 public:
  using Time = RedisOp::Time;

  // REQUIRES: a server at least. Connects to none.
  explicit RedisClient(RedisClientOptions options);
  ~RedisClient();  // after Stop, and Wait that said false

  void Submit(std::unique_ptr<RedisOp> op) KVS_EXCLUDES(mu_);
  // That have not ended, its own questions to servers too.
  size_t ops() const { return ops_; }
  // Null: not known yet.
  std::shared_ptr<const SlotMap> Topology() const KVS_EXCLUDES(mu_);
  // As of at most 100 ms ago.
  std::vector<RedisServerStats> Servers() const KVS_EXCLUDES(mu_);
  // A header, or a stripe, that this server gave failed its check.
  void NoteDamaged(const RedisAddress& server, Lane lane) KVS_EXCLUDES(mu_);
  // "": well; else what is wrong, for a person.
  std::string Illness() const KVS_EXCLUDES(mu_);
  // Looks for ops that were cancelled.
  void WakeUp();
  // All ops end, and Wait says false.
  void Stop() KVS_EXCLUDES(mu_);

  bool Wait(Time until = Time::max());  // at the longest
  void Work() KVS_EXCLUDES(mu_);

 private:
  class Loop;  // what the serving thread does

  const RedisClientOptions options_;
  const UniqueFd epoll_;
  const std::shared_ptr<UniqueFd> wake_;  // resolvers may outlive this object
  std::atomic<size_t> ops_ = 0;

  mutable Mutex mu_;
  std::vector<std::unique_ptr<RedisOp>> inbox_ KVS_GUARDED_BY(mu_);
  bool stopped_ KVS_GUARDED_BY(mu_) = false;
  std::shared_ptr<const SlotMap> map_ KVS_GUARDED_BY(mu_);
  std::vector<RedisServerStats> servers_ KVS_GUARDED_BY(mu_);
  struct Damaged {
    uint64_t probes = 0, reads = 0;
  };
  std::map<RedisAddress, Damaged> damaged_ KVS_GUARDED_BY(mu_);
  std::string illness_ KVS_GUARDED_BY(mu_);
  const std::unique_ptr<Loop> loop_;
};

}  // namespace kvstrata::redis
