// SPDX-License-Identifier: Apache-2.0
// TokenBucket: how many bytes may be moved now so that it is at most so many a second, a second's
// worth at once. For who moves less when there is no room, and does not wait (to wait:
// server/store/copy_rate.h).
//
// Thread-safety: all methods, from any thread.
#ifndef KVSTRATA_SERVER_WORK_TOKEN_BUCKET_H_
#define KVSTRATA_SERVER_WORK_TOKEN_BUCKET_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "base/sync.h"

namespace kvstrata {

class TokenBucket {
 public:
  using Clock = std::chrono::steady_clock;

  // 0: no limit.
  explicit TokenBucket(uint64_t bytes_a_second) { Set(bytes_a_second); }

  void Set(uint64_t bytes_a_second) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    rate_ = static_cast<double>(bytes_a_second);
    left_ = rate_;
    filled_ = Clock::now();
  }
  // Takes `bytes`; false: there is no room for them now, and none are taken. What is larger than a
  // second's worth goes when the bucket is full.
  bool Take(uint64_t bytes, Clock::time_point now) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (rate_ == 0) return true;
    const std::chrono::duration<double> since = std::max(now, filled_) - filled_;
    left_ = std::min(rate_, left_ + rate_ * since.count());
    filled_ = std::max(now, filled_);
    if (left_ < std::min(rate_, static_cast<double>(bytes))) return false;
    left_ -= static_cast<double>(bytes);
    return true;
  }

 private:
  Mutex mu_;
  double rate_ KVS_GUARDED_BY(mu_) = 0, left_ KVS_GUARDED_BY(mu_) = 0;
  Clock::time_point filled_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_TOKEN_BUCKET_H_
