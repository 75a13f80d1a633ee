// SPDX-License-Identifier: Apache-2.0
// RecentKeys: keys of which something was learned a short while ago, at most kMost of them: that a
// remote tier has not, or has, what lies under one.
//
// What was learned first is forgotten first. Thread-safety: all methods, from any thread; one lock
// of its own, for a look-up. Cost: 100 bytes a key.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/sync.h"
#include "server/store/pages/prefix_key.h"

namespace kvstrata {

class RecentKeys {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMost = 65536;

  explicit RecentKeys(std::chrono::microseconds ttl) : ttl_(ttl) {}

  // Forgets all, and has another time from now on.
  void Restart(std::chrono::microseconds ttl) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    ttl_ = ttl;
    learned_.clear();
    by_age_.clear();
  }
  void Add(const PageKey& key) KVS_EXCLUDES(mu_) {
    const Clock::time_point now = Clock::now();
    MutexLock lock(mu_);
    learned_[key] = now;
    by_age_.emplace_back(now, key);
    while (by_age_.size() > kMost) {
      const auto& [when, oldest] = by_age_.front();
      const auto at = learned_.find(oldest);
      if (at != learned_.end() && at->second == when) learned_.erase(at);
      by_age_.pop_front();
    }
  }
  void Erase(const PageKey& key) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    learned_.erase(key);
  }
  bool Contains(const PageKey& key) const KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    const auto at = learned_.find(key);
    return at != learned_.end() && Clock::now() - at->second < ttl_;
  }

 private:
  mutable Mutex mu_;
  std::chrono::microseconds ttl_ KVS_GUARDED_BY(mu_);
  std::unordered_map<PageKey, Clock::time_point, PageKeyHash> learned_ KVS_GUARDED_BY(mu_);
  // Each time that a key was added; a key that was added again lies here twice.
  std::deque<std::pair<Clock::time_point, PageKey>> by_age_ KVS_GUARDED_BY(mu_);
};

// What is known of a tier that must be asked.
struct KnownKeys {
  RecentKeys present, absent;

  void NotePresent(std::span<const PageKey> keys) {
    for (const PageKey& key : keys) {
      present.Add(key);
      absent.Erase(key);
    }
  }
};

}  // namespace kvstrata
