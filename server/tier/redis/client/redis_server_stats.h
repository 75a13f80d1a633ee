// SPDX-License-Identifier: Apache-2.0
// RedisServerStats: what the client counts of one server, since start but for what is so now.
// Thread-safety: values; the client publishes copies of its own.
#ifndef KVSTRATA_SERVER_TIER_REDIS_CLIENT_REDIS_SERVER_STATS_H_
#define KVSTRATA_SERVER_TIER_REDIS_CLIENT_REDIS_SERVER_STATS_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "server/tier/redis/client/redis_slots.h"

namespace kvstrata::redis {

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

}  // namespace kvstrata::redis

#endif  // KVSTRATA_SERVER_TIER_REDIS_CLIENT_REDIS_SERVER_STATS_H_
