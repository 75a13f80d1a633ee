// SPDX-License-Identifier: Apache-2.0
// Mutex, MutexLock and the annotations that let clang prove lock use (-Wthread-safety, preset
// `tidy`). gcc sees plain std::mutex.
#pragma once

#include <mutex>

#if defined(__clang__)
#define KVS_ANNOTATE(x) __attribute__((x))
#else
#define KVS_ANNOTATE(x)
#endif

#define KVS_CAPABILITY(x) KVS_ANNOTATE(capability(x))
#define KVS_SCOPED_CAPABILITY KVS_ANNOTATE(scoped_lockable)
#define KVS_GUARDED_BY(x) KVS_ANNOTATE(guarded_by(x))
#define KVS_REQUIRES(...) KVS_ANNOTATE(requires_capability(__VA_ARGS__))
#define KVS_EXCLUDES(...) KVS_ANNOTATE(locks_excluded(__VA_ARGS__))
#define KVS_ACQUIRE(...) KVS_ANNOTATE(acquire_capability(__VA_ARGS__))
#define KVS_RELEASE(...) KVS_ANNOTATE(release_capability(__VA_ARGS__))
#define KVS_NO_THREAD_SAFETY_ANALYSIS KVS_ANNOTATE(no_thread_safety_analysis)

namespace kvstrata {

class KVS_CAPABILITY("mutex") Mutex {
 public:
  void Lock() KVS_ACQUIRE() { mu_.lock(); }
  void Unlock() KVS_RELEASE() { mu_.unlock(); }
  std::mutex& native() { return mu_; }

 private:
  std::mutex mu_;
};

template <typename M = Mutex>
class KVS_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(M& mu) KVS_ACQUIRE(mu) : mu_(mu) { mu_.Lock(); }
  ~MutexLock() KVS_RELEASE() { mu_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  M& mu_;
};

}  // namespace kvstrata
