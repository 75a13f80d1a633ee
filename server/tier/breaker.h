// SPDX-License-Identifier: Apache-2.0
// Breaker: stops asking a device that fails, and asks it again from time to time.
//
// Opens after kFailures in a row (errors and deadlines, not a full disk); then one caller a
// cool-down may try, 1 s at first and up to 64 s; one success closes it. Thread-safety: none, the
// tier's lock.
#ifndef KVSTRATA_SERVER_TIER_BREAKER_H_
#define KVSTRATA_SERVER_TIER_BREAKER_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvstrata::disk {

class Breaker {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr uint32_t kFailures = 8;
  static constexpr std::chrono::seconds kFirstPause{1}, kLongestPause{64};

  bool open() const { return failures_ >= kFailures; }

  Time next_try() const { return next_try_; }  // of an open one

  bool Allow(Time now) {
    if (!open()) return true;
    if (now < next_try_) return false;
    next_try_ = now + pause_;  // for others; this one's outcome moves it
    return true;
  }
  void Succeeded() {
    failures_ = 0;
    pause_ = kFirstPause;
  }
  void Failed(Time now) {
    ++failures_;
    if (!open()) return;
    next_try_ = now + pause_;
    if (failures_ > kFailures) pause_ = std::min<std::chrono::seconds>(2 * pause_, kLongestPause);
  }

 private:
  uint32_t failures_ = 0;
  std::chrono::seconds pause_ = kFirstPause;
  Time next_try_{};
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_BREAKER_H_
