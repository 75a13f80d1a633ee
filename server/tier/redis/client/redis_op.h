// SPDX-License-Identifier: Apache-2.0
// RedisOp: a request of the tier's to whichever server has a slot, until its end; and how its
// client behaves. Thread-safety: a RedisOp belongs to who serves the client once it is
// submitted.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "server/tier/redis/client/redis_connection.h"
#include "server/tier/redis/client/redis_request.h"
#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata::redis {

// Requests of one kind have connections of their own, so that small ones are not behind large ones.
enum class Lane : uint8_t { kProbe, kRead, kWrite };
inline constexpr size_t kLanes = 3;

struct RedisClientOptions {
  std::vector<RedisAddress> servers;  // any of a cluster's, or the only one
  RedisLogin login;
  std::shared_ptr<RedisTls> tls;  // null: without
  uint32_t connections = 2;       // to a server, for each lane
  bool replica_reads = true;      // replicas answer what a master refuses, or is slow to answer
  std::chrono::milliseconds connect_timeout{1000};
  std::chrono::milliseconds stall_timeout{1000};  // a connection that owes an answer and is silent
  std::chrono::milliseconds hedge_after{50};      // then a replica is asked
  std::chrono::milliseconds refresh_interval{5000};
};

struct RedisOp {
  using Time = std::chrono::steady_clock::time_point;

  std::shared_ptr<const RedisRequest> request;
  Lane lane = Lane::kProbe;  // kWrite: masters only
  uint16_t slot = 0;
  std::optional<RedisAddress> at;  // this server, and no other
  bool master_only = false;
  BulkTarget target;  // where its one value goes
  bool to_target = false;
  Time deadline{};
  std::stop_token cancel;
  // In the thread that serves the client; must not block. OK: `replies` of all commands, which may
  // be errors. Then nothing of the client's touches `target` or the request's value.
  std::function<void(RedisOp&)> done;

  Status status;
  std::vector<RespReply> replies;
  RedisAddress answered_by;

 private:
  friend class RedisClient;
  friend class RedisServer;
  bool begun_ = false;                          // it was sent once
  bool queued_ = false;                         // it waits for a connection of `server_`
  bool hedged_ = false;                         // a second server was asked, or there is none
  std::shared_ptr<const RedisRequest> asking_;  // sent in place of `request`
  uint32_t failures_ = 0;
  uint32_t redirections_ = 0;
  size_t next_ = 0;      // which server of its shard is asked next
  uint32_t server_ = 0;  // number of the one that has it; 0: none
  uint64_t link_ = 0;    // the connection it is in flight on; 0: none
  Time asked_{};         // when `server_` was asked
  Time wake_{};
  std::list<RedisOp*>::iterator place_;  // in the queue
};

}  // namespace kvstrata::redis
