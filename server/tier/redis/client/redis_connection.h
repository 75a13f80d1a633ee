// SPDX-License-Identifier: Apache-2.0
// RedisConnection: one connection to one server, with requests in flight on it.
//
// It connects, makes the TLS handshake, logs in, and then sends exchanges and reads their replies,
// in order. Whoever polls its descriptor calls Move when something may go on. A connection that
// failed, or whose exchange took too long, is closed by destroying it: nothing that comes later
// touches memory of whoever waited.
//
// Thread-safety: none. Cost: a Move reads and writes about 1 MiB at most. Errors: those of
// RedisSocket and RespReader, and UNAVAILABLE REDIS_LOGIN.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/tier/redis/client/redis_request.h"
#include "server/tier/redis/client/redis_socket.h"
#include "server/tier/redis/client/resp_reader.h"

namespace kvstrata::redis {

struct RedisLogin {
  std::string user;      // "": the default user
  std::string password;  // "": none is asked for
};

class RedisConnection {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Exchanges = std::vector<std::unique_ptr<RedisExchange>>;
  struct Traffic {
    uint64_t sent = 0, received = 0;  // bytes
  };

  // `reads`: a cluster's replica answers reads, and does not redirect them.
  RedisConnection(RedisSocket socket, const RedisLogin& login, bool reads, Time now);

  int fd() const { return socket_.fd(); }
  bool ready() const { return ready_; }
  size_t in_flight() const { return exchanges_.size(); }
  // It waits to be able to write, too.
  bool wants_write() const;
  // When bytes moved last, or began to be due.
  Time progress() const { return progress_; }
  // When bytes came last, or it was made.
  Time heard() const { return heard_; }
  // Since the last call.
  Traffic TakeTraffic() { return std::exchange(traffic_, {}); }

  // REQUIRES: ready. It is written by the next Move.
  void Send(std::unique_ptr<RedisExchange> exchange, Time now);
  // Reads and writes what can be; moves what is answered to `ended`, in order. Not OK: the
  // connection is to be destroyed.
  Status Move(Time now, Exchanges* ended);
  // Nobody waits for the exchange of `owner` any more, and its memory is free. False: that is in
  // use, or not known here, and only the connection's end frees it.
  bool LetGo(const void* owner);
  // What is not answered, oldest first.
  Exchanges TakeUnanswered();

 private:
  Status Read(Time now, Exchanges* ended);
  Status Write(Time now);
  Status Take(RespReply reply, Exchanges* ended);
  void ExpectNext();

  RedisSocket socket_;
  RespReader reader_;
  std::deque<std::unique_ptr<RedisExchange>> exchanges_;  // oldest first
  size_t written_exchanges_ = 0;                          // those that are written whole
  uint64_t written_ = 0;                                  // bytes of the next one
  std::vector<iovec> parts_;                              // scratch
  bool ready_ = false;
  Traffic traffic_;
  Time progress_, heard_;
};

}  // namespace kvstrata::redis
