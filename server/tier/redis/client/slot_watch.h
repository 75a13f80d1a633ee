// SPDX-License-Identifier: Apache-2.0
// SlotWatch: what a client knows of which server has what, when to ask again, and whom.
//
// One question (CLUSTER SLOTS) is in flight at a time: to servers of the last map in turn, then to
// those of the configuration. It is asked at intervals, sooner while the map has no replicas (a
// new cluster names none at first) or a server refused something.
// Thread-safety: none. Cost: none between questions.
#pragma once

#include <memory>
#include <vector>

#include "server/tier/redis/client/redis_op.h"
#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata::redis {

class SlotWatch {
 public:
  using Time = RedisOp::Time;

  explicit SlotWatch(const RedisClientOptions* options) : options_(*options) {}

  // Null: not known yet.
  const std::shared_ptr<const SlotMap>& map() const { return map_; }
  // Every server was asked in vain since the last answer, and why the last one was.
  bool down() const { return down_; }
  const Status& why() const { return why_; }
  // When to Begin the next question; max while one is in flight.
  Time due() const { return asking_ ? Time::max() : due_; }

  // Whom to ask now.
  RedisAddress Begin(Time now);
  // The answer, or what became of the question. True: the map is a new one.
  bool End(const RedisOp& op, Time now);
  // Asks again soon.
  void Soon(Time now);
  // What MOVED said holds until the next answer.
  void Learn(const Redirection& to);
  // The map or the configuration names it.
  bool Names(const RedisAddress& server) const;
  // The map does, as a master or a replica; as the master of slots. Before there is one, those of
  // the configuration are masters.
  bool Lists(const RedisAddress& server) const;
  bool IsMaster(const RedisAddress& server) const;
  // Slots of the map that no server has; cost: a pass over it.
  size_t unserved() const;

 private:
  Result<SlotMap> MapOf(const RedisOp& op) const;
  std::vector<RedisAddress> Servers() const;

  const RedisClientOptions& options_;
  std::shared_ptr<const SlotMap> map_;
  bool asking_ = false, down_ = false;
  size_t turn_ = 0, failures_ = 0;
  Time due_{}, began_{};
  Status why_;
};

}  // namespace kvstrata::redis
