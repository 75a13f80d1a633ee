// SPDX-License-Identifier: Apache-2.0
// DescriptorCloser: closes what clients passed, and the sockets that may still hold such
// descriptors, on threads that nobody waits for.
//
// Closing can block: a TCP socket with SO_LINGER waits for its peer, a file of a FUSE mount for
// whoever serves it, the last descriptor of a large memfd frees all of it; and closing a Unix
// socket closes the descriptors that wait in it. No thread that serves others may do that.
//
// Descriptors wait by user and are taken in rotation, at most kPerUser of a user's at a time, by at
// most kMaxThreads threads, which end when there is nothing to do. One that takes longer than
// `deadline` is interrupted by SIGURG (whose handler, installed here, does nothing), at every Tick
// again: that ends the wait of a lingering socket. What blocks all the same is late after
// `given_up`, which health tells, and keeps its thread; behind kPerUser of those a user's others
// wait. A user with kMaxWaiting that wait behind one that blocks is to be refused (MayTake).
//
// Ownership: takes what it is given. Threads that hang outlive it, and end with the process.
// Thread-safety: all methods, from any thread; nothing blocks. Cost: a lock and at most one
// wake-up; the first of a while makes a thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/unique_fd.h"

namespace kvstrata {

struct ClosingTimes {
  std::chrono::milliseconds deadline{100};
  std::chrono::milliseconds given_up{2'000};
};

struct ClosingCounters {
  uint64_t closed = 0, interrupted = 0;  // since the start; signals that were sent
  size_t pending = 0;                    // neither closed nor given up
  size_t late = 0;                       // given up and still closing
  uint32_t late_user = 0;                // one of their users
};

class DescriptorCloser {
 public:
  static constexpr size_t kMaxThreads = 32, kPerUser = 2, kMaxWaiting = 64;
  static constexpr size_t kMostWaiting = 4096;

  explicit DescriptorCloser(ClosingTimes times = {});
  // Threads that wait for work end; what waits is closed before.
  ~DescriptorCloser();
  DescriptorCloser(const DescriptorCloser&) = delete;
  DescriptorCloser& operator=(const DescriptorCloser&) = delete;

  void Put(UniqueFd fd, uint32_t user);
  // Not when kMaxWaiting of the user's wait while one of them is over its deadline, or kMostWaiting
  // in any case.
  bool MayTake(uint32_t user) const;
  // Interrupts what is over its deadline. Called every 100 ms or so.
  void Tick();
  ClosingCounters counters() const;
  // Waits until nothing is pending, at most until `until`.
  void Await(std::chrono::steady_clock::time_point until);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the threads
};

// A descriptor that is closed by a DescriptorCloser, which outlives it. Move-only; -1 is "none".
class PassedFd {
 public:
  PassedFd() = default;
  PassedFd(UniqueFd fd, DescriptorCloser* closer, uint32_t user)
      : fd_(std::move(fd)), closer_(closer), user_(user) {}
  PassedFd(PassedFd&&) noexcept = default;
  PassedFd& operator=(PassedFd&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    fd_ = std::move(other.fd_);
    closer_ = other.closer_;
    user_ = other.user_;
    return *this;
  }
  ~PassedFd() { Reset(); }

  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  void set_user(uint32_t user) { user_ = user; }
  void Reset() {
    if (fd_) closer_->Put(std::move(fd_), user_);
  }

 private:
  UniqueFd fd_;
  DescriptorCloser* closer_ = nullptr;
  uint32_t user_ = 0;
};

}  // namespace kvstrata
