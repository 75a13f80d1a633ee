// SPDX-License-Identifier: Apache-2.0
// Breaker: stops asking a device or a server that fails, and asks it again from time to time.
//
// Opens after some failures in a row (errors and deadlines, not a full disk); then one caller a
// pause may try, each pause twice the last one up to a longest; one success closes it.
// Thread-safety: none, the tier's lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace kvstrata {

class Breaker {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Pause = std::chrono::milliseconds;
  // A disk's.
  static constexpr uint32_t kFailures = 8;
  static constexpr std::chrono::seconds kFirstPause{1}, kLongestPause{64};

  Breaker() : Breaker(kFailures, kFirstPause, kLongestPause) {}
  Breaker(uint32_t failures, Pause first_pause, Pause longest_pause)
      : most_(failures), first_pause_(first_pause), longest_pause_(longest_pause) {}

  bool open() const { return failures_ >= most_; }

  Time next_try() const { return next_try_; }  // when an open one lets somebody try

  bool Allow(Time now) {
    if (!open()) return true;
    if (now < next_try_) return false;
    next_try_ = now + pause_;  // for others; this one's outcome moves it
    return true;
  }
  void Succeeded() {
    failures_ = 0;
    pause_ = first_pause_;
  }
  void Failed(Time now) {
    ++failures_;
    if (!open()) return;
    next_try_ = now + pause_;
    if (failures_ > most_) pause_ = std::min(2 * pause_, longest_pause_);
  }
  // For a failure that leaves no doubt: opens at once.
  void FailedForSure(Time now) {
    failures_ = std::max(failures_, most_ - 1);
    Failed(now);
  }

 private:
  uint32_t most_;
  Pause first_pause_, longest_pause_;
  uint32_t failures_ = 0;
  Pause pause_ = first_pause_;
  Time next_try_{};
};

}  // namespace kvstrata
