// SPDX-License-Identifier: Apache-2.0
// HotCacheBudget: how much of a GPU's memory the hot caches (cuda_hot_pages.h, cuda_hot_rows.h) of
// a session's sequences may take together, so that they leave room for what an engine allocates
// later.
//
// Threads: any; no lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kvstrata {

class HotCacheBudget {
 public:
  explicit HotCacheBudget(uint64_t bytes) : left_(bytes) {}
  HotCacheBudget(const HotCacheBudget&) = delete;
  HotCacheBudget& operator=(const HotCacheBudget&) = delete;

  // Takes `base` bytes and as many of `slots` slots as what is left is enough for; their number.
  // 0: nothing is taken. REQUIRES: slot_bytes > 0.
  uint64_t Take(uint64_t base, uint64_t slot_bytes, uint64_t slots) {
    uint64_t left = left_.load(std::memory_order_relaxed), taken = 0;
    do {
      taken = left <= base ? 0 : std::min(slots, (left - base) / slot_bytes);
    } while (taken > 0 && !left_.compare_exchange_weak(left, left - base - taken * slot_bytes,
                                                       std::memory_order_relaxed));
    return taken;
  }
  void Give(uint64_t bytes) { left_.fetch_add(bytes, std::memory_order_relaxed); }
  uint64_t left() const { return left_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> left_;
};

}  // namespace kvstrata
