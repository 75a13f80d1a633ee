// SPDX-License-Identifier: Apache-2.0
// RedisServer: the connections to one server, what waits for one, and the server's breaker.
//
// It opens connections as they are needed, up to a number for each lane, and sends on the one with
// the least in flight. It decides nothing about what failed: ops that it gives back go to
// `returned`. Thread-safety: none; the client's thread.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/tier/breaker.h"
#include "server/tier/redis/client/redis_op.h"
#include "server/tier/redis/client/redis_resolver.h"
#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata::redis {

// RedisServerStats: what the client counts of one server, since start but for what is so now.
// Thread-safety: values; the client publishes copies of its own.

// What became of values, or of their headers, that a server was asked for.
struct RedisAnswers {
  uint64_t hits = 0;     // it had them
  uint64_t absent = 0;   // it had them not
  uint64_t refused = 0;  // an error: a redirection, a right that is missing
  uint64_t late = 0;     // no answer by the deadline
  uint64_t lost = 0;     // the connection ended first; another server may have been asked
  uint64_t damaged = 0;  // hits that failed their check
};

// Bin i: at most 16 us << 2i, and above the bin before; the last has the rest.
struct RedisAnswerTimes {
  static constexpr size_t kBounds = 12;
  static constexpr uint64_t BoundUs(size_t i) { return uint64_t{16} << (2 * i); }

  void Add(std::chrono::steady_clock::duration took) {
    const auto us =
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(took).count());
    size_t bin = 0;
    while (bin < kBounds && us > BoundUs(bin)) ++bin;
    ++counts[bin];
    sum_us += us;
  }

  std::array<uint64_t, kBounds + 1> counts{};
  uint64_t sum_us = 0;
};

struct RedisServerStats {
  RedisAddress address;
  bool open = false;  // its breaker: it is left alone
  std::string last_error;
  uint64_t requests = 0, failures = 0, timeouts = 0, hedges = 0;
  uint64_t openings = 0;            // how often the breaker opened
  uint64_t connections = 0;         // now
  RedisAnswers probes, reads;       // headers; stripes
  uint64_t sent = 0, received = 0;  // bytes on its connections, without TLS's own
  RedisAnswerTimes times;           // from sending a request until its whole answer
};

// An op that a server has no more: answered (OK), or not.
struct ReturnedOp {
  RedisOp* op = nullptr;
  Status status;
  bool blameless = false;  // another op's end closed the connection
};
using ReturnedOps = std::vector<ReturnedOp>;

class RedisServer {
 public:
  using Time = RedisOp::Time;

  // `number` > 0 is in what epoll returns: number << 32 | the connection's.
  RedisServer(uint32_t number, RedisAddress address, const RedisClientOptions* options, int epoll,
              RedisResolver* resolver);

  const RedisAddress& address() const { return address_; }
  uint32_t number() const { return number_; }
  Breaker& breaker() { return breaker_; }
  RedisServerStats& stats() { return stats_; }
  // When a connection said something last.
  Time heard() const { return heard_; }

  // Queues; Pump sends.
  void Add(RedisOp* op, Time now);
  // Takes back what waits, or is in flight and can be let go of. False: only Close can.
  bool TakeBack(RedisOp* op);
  // Opens connections and sends.
  void Pump(Time now, ReturnedOps* returned);
  // `link`: what epoll returned.
  void Move(uint64_t link, Time now, ReturnedOps* returned);
  // Closes the connection that has `op`, since its deadline has passed.
  void Close(const RedisOp* op, Time now, ReturnedOps* returned);
  // Closes connections that owe an answer and are silent; all, where it is told to.
  void CloseStalled(Time now, ReturnedOps* returned);
  void CloseAll(const Status& why, Time now, ReturnedOps* returned);
  // When the next one would be closed.
  Time next_stall() const;
  bool idle() const;  // nothing waits, nothing is in flight

 private:
  struct Link {
    Lane lane;
    Time begun;
    std::unique_ptr<RedisConnection> connection;
    uint32_t events = 0;
  };
  using Links = std::map<uint64_t, Link>;

  // The ready connection with the least in flight, and what there is of the lane.
  Links::iterator Choose(Lane lane, size_t* links, bool* connecting);
  void PumpLane(Lane lane, Time now, ReturnedOps* returned);
  Status Connect(Lane lane, Time now);
  void Send(Links::iterator link, RedisOp* op, Time now);
  void Watch(uint64_t id, Link* link);
  // What ended a connection: an op's deadline, though the server spoke, or did not speak; bytes
  // that are no replies, or no more bytes; the server, which cannot be reached, is silent, or
  // refuses us.
  enum class Cause : uint8_t { kDeadline, kSilence, kCut, kServer };
  // A connection ended; what is in flight on it comes back, and all that waits if the breaker
  // opens.
  void End(Links::iterator link, const Status& why, Cause cause, Time now, ReturnedOps* returned);
  void ReturnQueue(Lane lane, const Status& why, ReturnedOps* returned);
  // The breaker hears of a failure.
  void Blame(bool for_sure, Time now);
  // An op was answered, or its connection has ended.
  void Count(const RedisOp& op, bool answered, Time now);
  Time StallOf(const Link& link) const;

  const uint32_t number_;
  const RedisAddress address_;
  const RedisClientOptions& options_;
  const int epoll_;
  RedisResolver* const resolver_;
  Breaker breaker_;
  RedisServerStats stats_;
  Links links_;
  uint32_t last_link_ = 0;
  Time heard_{};
  std::array<std::list<RedisOp*>, kLanes> queues_;
};

}  // namespace kvstrata::redis
