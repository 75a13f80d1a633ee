// SPDX-License-Identifier: Apache-2.0
// YieldingMutex: a mutex whose holder can let waiters in, for what is mostly held for microseconds
// and now and then for a long request, which then works in pieces.
//
// A holder that unlocks and locks again gets a std::mutex back before a waiter has woken, every
// time. Yield comes back after a waiter has had it.
//
// Thread-safety: all methods, from any thread. Cost: Lock and Unlock are those of std::mutex, and a
// wait counts itself; Yield is one load while nobody waits, else a change of threads.
#ifndef KVSTRATA_BASE_YIELDING_MUTEX_H_
#define KVSTRATA_BASE_YIELDING_MUTEX_H_

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/sync.h"

namespace kvstrata {

class KVS_CAPABILITY("mutex") YieldingMutex {
 public:
  void Lock() KVS_ACQUIRE() KVS_NO_THREAD_SAFETY_ANALYSIS {
    if (mu_.try_lock()) return;
    waiting_.fetch_add(1);
    mu_.lock();
    waiting_.fetch_sub(1);
    admitted_.fetch_add(1);
    admitted_.notify_all();
  }
  void Unlock() KVS_RELEASE() KVS_NO_THREAD_SAFETY_ANALYSIS { mu_.unlock(); }

  // If anybody waits, at least one of them has had the mutex when it returns, and the caller has it
  // again.
  void Yield() KVS_REQUIRES(this) KVS_NO_THREAD_SAFETY_ANALYSIS {
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

}  // namespace kvstrata

#endif  // KVSTRATA_BASE_YIELDING_MUTEX_H_
