// SPDX-License-Identifier: Apache-2.0
// StoreLock: the one lock of a store. What its owners keep changes together, so one mutex guards it
// all; `store_lock` is the fact that the caller's store is locked, which clang proves across the
// owners (KVS_REQUIRES, KVS_GUARDED_BY).
//
// A store's methods that take the lock say KVS_EXCLUDES(store_lock), those that are called under it
// KVS_REQUIRES(store_lock). Held for microseconds; what is longer works in pieces
// (books.h). Thread-safety, cost: YieldingMutex's (base/yielding_mutex.h).
#ifndef KVSTRATA_SERVER_STORE_OPTIONS_STORE_LOCK_H_
#define KVSTRATA_SERVER_STORE_OPTIONS_STORE_LOCK_H_

#include <mutex>

#include "base/sync.h"
#include "base/yielding_mutex.h"

namespace kvstrata {

class KVS_CAPABILITY("mutex") StoreLocked {};
inline constexpr StoreLocked store_lock;

class StoreMutex {
 public:
  void Lock() KVS_ACQUIRE(store_lock) KVS_NO_THREAD_SAFETY_ANALYSIS { mu_.Lock(); }
  void Unlock() KVS_RELEASE(store_lock) KVS_NO_THREAD_SAFETY_ANALYSIS { mu_.Unlock(); }
  // Whoever waits has had the lock when it returns, and the caller has it again.
  void Yield() KVS_REQUIRES(store_lock) KVS_NO_THREAD_SAFETY_ANALYSIS { mu_.Yield(); }
  uint32_t waiting() const { return mu_.waiting(); }
  std::mutex& native() { return mu_.native(); }

 private:
  YieldingMutex mu_;
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

#endif  // KVSTRATA_SERVER_STORE_OPTIONS_STORE_LOCK_H_
