// SPDX-License-Identifier: Apache-2.0
// CopyRate: when copies may begin so that on average they move at most so many bytes a second.
// Full-speed copies to a GPU take memory bandwidth that a decode beside them lacks
// (docs/cuda_measured.md).
//
// Thread-safety: any thread; copies of all threads share the rate. Units: bytes, seconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/sync.h"

namespace kvstrata {

class CopyRate {
 public:
  using Clock = std::chrono::steady_clock;

  // 0: no limit.
  explicit CopyRate(uint64_t bytes_a_second) : rate_(bytes_a_second) {}

  // For copies that begin later.
  void Set(uint64_t bytes_a_second) { rate_ = bytes_a_second; }

  uint64_t bytes_a_second() const { return rate_; }

  // What one copy should move: enough for full speed, little enough for an even rate.
  uint64_t burst_bytes() const {
    constexpr uint64_t kMost = uint64_t{64} << 20;
    const uint64_t rate = rate_;
    return rate == 0 ? kMost : std::clamp<uint64_t>(rate / 256, 1, kMost);
  }

  // When a copy of `bytes` may begin that is wanted now.
  Clock::time_point Begin(uint64_t bytes, Clock::time_point now) KVS_EXCLUDES(mu_) {
    const uint64_t rate = rate_;
    if (rate == 0) return now;
    MutexLock lock(mu_);
    const Clock::time_point begin = std::max(now, next_);
    const std::chrono::duration<double> takes(static_cast<double>(bytes) /
                                              static_cast<double>(rate));
    next_ = begin + std::chrono::duration_cast<Clock::duration>(takes);
    return begin;
  }

 private:
  std::atomic<uint64_t> rate_;
  Mutex mu_;
  Clock::time_point next_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
