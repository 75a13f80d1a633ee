// SPDX-License-Identifier: Apache-2.0
// TokenBucket: how many bytes may be moved now so that it is at most so many a second, a second's
// worth at once. For who moves less when there is no room, and does not wait (to wait:
// server/store/options/copy_rate.h).
//
// Thread-safety: none; its owner's lock guards it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvstrata {

class TokenBucket {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // 0: no limit. It is full.
  explicit TokenBucket(uint64_t bytes_a_second)
      : rate_(static_cast<double>(bytes_a_second)), left_(rate_) {}

  // Takes `bytes`; false: there is no room for them now, and none are taken. What is larger than a
  // second's worth goes when the bucket is full.
  bool Take(uint64_t bytes, Time now) {
    if (rate_ == 0) return true;
    left_ = LeftAt(now);
    filled_ = std::max(now, filled_);
    if (left_ < std::min(rate_, static_cast<double>(bytes))) return false;
    left_ -= static_cast<double>(bytes);
    return true;
  }
  // As good as a new one.
  bool IsFull(Time now) const { return LeftAt(now) == rate_; }

 private:
  double LeftAt(Time now) const {
    const std::chrono::duration<double> since = std::max(now, filled_) - filled_;
    return std::min(rate_, left_ + rate_ * since.count());
  }

  double rate_, left_;
  Time filled_{};
};

}  // namespace kvstrata
