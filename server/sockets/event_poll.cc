// SPDX-License-Identifier: Apache-2.0
#include "server/sockets/event_poll.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"

namespace kvstrata {
namespace {

void Ring(const UniqueFd& event) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(event.get(), &one, sizeof(one));  // full: it wakes too
}

}  // namespace

bool EventPoll::Open() {
  epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
  wake_ = std::make_shared<const UniqueFd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return epoll_ && *wake_;
}

bool EventPoll::Control(int what, int fd, Kind kind, uint64_t number, uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number * kKinds + kind;
  return epoll_ctl(epoll_.get(), what, fd, &event) == 0;
}

bool EventPoll::Watch(int fd, Kind kind, uint64_t number, uint32_t events) {
  return Control(EPOLL_CTL_ADD, fd, kind, number, events);
}

bool EventPoll::Rewatch(int fd, Kind kind, uint64_t number, uint32_t events) {
  return Control(EPOLL_CTL_MOD, fd, kind, number, events);
}

void EventPoll::Unwatch(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

int EventPoll::Wait(std::span<epoll_event> events, int timeout_ms) {
  const int n =
      epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  KVS_CHECK(n >= 0 || errno == EINTR);
  return n;
}

void EventPoll::Wake() const { Ring(*wake_); }

std::function<void()> EventPoll::waker() const {
  return [fd = wake_] { Ring(*fd); };
}

}  // namespace kvstrata
