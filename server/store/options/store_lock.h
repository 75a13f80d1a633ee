// SPDX-License-Identifier: Apache-2.0
// StoreLock: the one lock of a store. What its owners keep changes together, so one mutex guards it
// all; `store_lock` is the fact that the caller's store is locked, which clang proves across the
// owners (KVS_REQUIRES, KVS_GUARDED_BY).
//
// A store's methods that take the lock say KVS_EXCLUDES(store_lock), those that are called under it
// KVS_REQUIRES(store_lock). Held for microseconds; what is longer works in pieces (books.h) and
// lets waiters in between. A holder that unlocks and locks again gets a std::mutex back before a
// waiter has woken, every time: StoreMutex::Yield comes back after a waiter has had it.
//
// Thread-safety: all methods, from any thread. Cost: Lock and Unlock are those of std::mutex, and a
// wait counts itself; Yield is one load while nobody waits, else a change of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/sync.h"

namespace kvstrata {

class KVS_CAPABILITY("mutex") StoreLocked {};
inline constexpr StoreLocked store_lock;

class StoreMutex {
 public:
  void Lock() KVS_ACQUIRE(store_lock) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (mu_.try_lock()) return;
    waiting_.fetch_add(1);
    mu_.lock();
    waiting_.fetch_sub(1);
    admitted_.fetch_add(1);
    admitted_.notify_all();
  }
  void Unlock() KVS_RELEASE(store_lock) KVS_NO_THREAD_SAFETY_ANALYSIS { mu_.unlock(); }
  // If anybody waits, at least one of them has had the lock when it returns, and the caller has it
  // again.
  void Yield() KVS_REQUIRES(store_lock) KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (waiting_.load() == 0) return;
    const uint32_t admitted = admitted_.load();
    mu_.unlock();
    admitted_.wait(admitted);  // who was counted while this thread held the mutex is yet to come
    Lock();
  }
  // Threads that wait in Lock now.
  uint32_t waiting() const { return waiting_.load(); }
  std::mutex& native() { return mu_; }

 private:
  std::mutex mu_;
  std::atomic<uint32_t> waiting_{0};
  std::atomic<uint32_t> admitted_{0};  // how many who waited have had it, so far
};

class KVS_SCOPED_CAPABILITY StoreLock {
 public:
  explicit StoreLock(StoreMutex& mu) KVS_ACQUIRE(store_lock) : mu_(mu) { mu_.Lock(); }
  ~StoreLock() KVS_RELEASE() { mu_.Unlock(); }
  StoreLock(const StoreLock&) = delete;
  StoreLock& operator=(const StoreLock&) = delete;

 private:
  StoreMutex& mu_;
};

}  // namespace kvstrata
