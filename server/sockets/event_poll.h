// SPDX-License-Identifier: Apache-2.0
// EventPoll: what a loop over sockets sleeps on: an epoll, and an event by which other threads wake
// it. An event says whose descriptor it is, by the connection's number, and of what kind.
//
// Thread-safety: Wait is the loop's; the others, any thread. Cost: one system call.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/unique_fd.h"

namespace kvstrata {

class EventPoll {
 public:
  enum Kind : uint64_t { kListener, kStop, kTimer, kSocket, kPidfd, kDoorbell, kWake };
  static Kind KindOf(const epoll_event& event) {
    return static_cast<Kind>(event.data.u64 % kKinds);
  }
  static uint64_t NumberOf(const epoll_event& event) { return event.data.u64 / kKinds; }

  // Once, before anything else. False of this and of Watch: see errno.
  bool Open();
  bool Watch(int fd, Kind kind, uint64_t number, uint32_t events);
  bool WatchWake() { return Watch(wake_->get(), kWake, 0, EPOLLIN | EPOLLET); }
  // Other events of a descriptor that is watched.
  bool Rewatch(int fd, Kind kind, uint64_t number, uint32_t events);
  void Unwatch(int fd);
  // How many of `events` were filled in.
  int Wait(std::span<epoll_event> events, int timeout_ms);

  void Wake() const;
  // Wakes the loop as long as it is there; may outlive it.
  std::function<void()> waker() const;

 private:
  static constexpr uint64_t kKinds = 8;

  bool Control(int what, int fd, Kind kind, uint64_t number, uint32_t events) const;

  UniqueFd epoll_;
  // Shared with those who wake the loop: they may outlive it.
  std::shared_ptr<const UniqueFd> wake_;
};

}  // namespace kvstrata
