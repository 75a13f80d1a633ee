// SPDX-License-Identifier: Apache-2.0
// AttachState: what the parts of the attach loop share: the connections, what they are watched by,
// and the threads that do for the loop what takes long.
//
// Thread-safety: the loop's, but for what synchronises itself: the counts, the events, the closer
// and the queue.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "server/attach/attach_server.h"
#include "server/attach/fair_queue.h"
#include "server/attach/peers/descriptor_passing.h"
#include "server/attach/peers/peer.h"
#include "server/attach/ring/ring_session.h"
#include "server/sockets/descriptor_closer.h"
#include "server/sockets/event_poll.h"
#include "server/store/options/session_types.h"
#include "server/store/store.h"
#include "server/telemetry/log.h"

namespace kvstrata {

// AttachConnection: one connection of the attach server, from accept on (attach_server.h says what
// becomes of it); ConnectionTable: all of them. Thread-safety: the loop's, but for what a lent
// connection is lent for (connection_ends.h).

inline constexpr uint32_t kNoUser = ~uint32_t{0};  // the daemon's own work; a peer not yet known

struct AttachConnection {
  // kPassed: it redeemed a token, and has no ring.
  enum class State { kHandshake, kOpen, kPassed, kDetaching, kFenced };
  State state = State::kHandshake;
  uint64_t number = 0;
  PassedFd socket;  // descriptors may wait in it
  UniqueFd pidfd, doorbell;
  PeerIdentity peer;
  std::chrono::steady_clock::time_point deadline;
  uint64_t session = 0;
  std::shared_ptr<ArenaMailbox> mailbox;
  std::unique_ptr<DescriptorInbox> inbox;
  std::unique_ptr<RingSession> ring;
  // Set in one that redeemed a token. Gone when the store grants it nothing more: the session has
  // ended, or another connection took this one's place.
  std::weak_ptr<const void> granting;
  bool writes = false;  // the store counts its process as a writer
  // Another thread has it, and the loop looks at nothing of it but its state and deadline. Where
  // an event came meanwhile, its source is muted: no longer watched.
  bool lent = false, socket_muted = false, pidfd_muted = false;
  bool end_is_long = false;
  uint32_t device = 0;
  std::function<void()> then;  // called when it comes back
  EndedSession ended;          // once it has
  // What the thread that had it says.
  RingSession::Outcome outcome = RingSession::Outcome::kIdle;
  Status status;
};

class ConnectionTable {
 public:
  using Map = std::map<uint64_t, std::unique_ptr<AttachConnection>>;

  // A new one, with the next number.
  AttachConnection* Add(PassedFd socket) {
    auto connection = std::make_unique<AttachConnection>();
    AttachConnection* const c = connection.get();
    c->number = next_number_++;
    c->socket = std::move(socket);
    all_.emplace(c->number, std::move(connection));
    return c;
  }
  // Null: it has ended.
  AttachConnection* Find(uint64_t number) const {
    const auto found = all_.find(number);
    return found == all_.end() ? nullptr : found->second.get();
  }
  void Erase(const AttachConnection* c) { all_.erase(c->number); }
  void Clear() {
    open_.clear();
    all_.clear();
  }
  const Map& all() const { return all_; }

  // Those with rings that are not lent.
  const std::vector<AttachConnection*>& open() const { return open_; }
  void Serve(AttachConnection* c) { open_.push_back(c); }
  void StopServing(AttachConnection* c) { std::erase(open_, c); }

 private:
  Map all_;
  std::vector<AttachConnection*> open_;
  uint64_t next_number_ = 1;
};

// AttachCounters, counted. Thread-safety: any thread.
class AttachCounts {
 public:
  enum Counter {
    kAttached,
    kPassed,
    kRefused,
    kTimedOut,
    kDetached,
    kHungUp,
    kDied,
    kMalformed,
    kFrames,
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
  LogLimiter limiter{kLogLinesPerSecond};  // lines about clients
};

}  // namespace kvstrata
