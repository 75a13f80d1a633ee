// SPDX-License-Identifier: Apache-2.0
// AttachState: what the parts of the attach loop share: the connections, what they are watched by,
// and the threads that do for the loop what takes long.
//
// Thread-safety: the loop's, but for what synchronises itself: the counts, the events, the closer
// and the queue.
#ifndef KVSTRATA_SERVER_ATTACH_ATTACH_STATE_H_
#define KVSTRATA_SERVER_ATTACH_ATTACH_STATE_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "server/attach/attach_connection.h"
#include "server/attach/attach_server.h"
#include "server/attach/fair_queue.h"
#include "server/sockets/descriptor_closer.h"
#include "server/sockets/event_poll.h"
#include "server/store/store.h"
#include "server/telemetry/log.h"

namespace kvstrata {

// AttachCounters, counted. Thread-safety: any thread.
class AttachCounts {
 public:
  enum Counter {
    kAccepted,
    kAttached,
    kPassed,
    kRefused,
    kTimedOut,
    kDetached,
    kHungUp,
    kDied,
    kMalformed,
    kFrames,
    kReclaims,
    kCounters
  };
  void Count(Counter c, uint64_t n = 1) { counts_[c].fetch_add(n, std::memory_order_relaxed); }
  uint64_t of(Counter c) const { return counts_[c].load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<uint64_t>, kCounters> counts_{};
};

struct AttachState {
  AttachState(const AttachOptions& with, Store* of)
      : options(with), hello_timeout(with.hello_timeout), store(of), queue(with.threads) {}

  // Whether a line about a client may be written now; how many were not since the last one.
  bool MayLog(uint64_t* suppressed);
  bool WatchSocket(const AttachConnection* c) {
    return events.Watch(c->socket.get(), EventPoll::kSocket, c->number, EPOLLIN | EPOLLRDHUP);
  }
  bool WatchPidfd(const AttachConnection* c) {
    return events.Watch(c->pidfd.get(), EventPoll::kPidfd, c->number, EPOLLIN);
  }

  static constexpr uint32_t kLogLinesPerSecond = 10;

  const AttachOptions options;
  std::atomic<std::chrono::microseconds> hello_timeout;  // not that of `options`
  Store* const store;
  AttachCounts counts;
  EventPoll events;
  DescriptorCloser closer;
  FairQueue queue;
  ConnectionTable connections;
  LogLimiter limiter{kLogLinesPerSecond};
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_ATTACH_STATE_H_
