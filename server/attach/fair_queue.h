// SPDX-License-Identifier: Apache-2.0
// FairQueue: threads for what would keep a loop too long, shared among users in rotation.
//
// Users are served in rotation, whatever each of them has posted; of a user's tasks short ones come
// first. Long tasks run on all threads but one, and those of one user on half of these, so that
// neither a user with many clients nor several keep others' tasks, or anybody's short ones, from
// beginning.
//
// Ownership: owns its threads and what waits. Thread-safety: all methods, from any thread. Tasks do
// not wait for other tasks; what one throws is a bug of its own. Cost: one allocation and at most
// one wake-up a task.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/sync.h"

namespace kvstrata {

class FairQueue {
 public:
  enum class Length : uint8_t { kShort, kLong };
  using Task = std::function<void()>;

  // REQUIRES: threads >= 2. They are named kvs-long.
  explicit FairQueue(size_t threads) : longs_(threads - 1), longs_per_user_((longs_ + 1) / 2) {}
  ~FairQueue() { Stop(); }

  // RESOURCE_EXHAUSTED THREADS. Once, before anything else.
  Status Start();
  // Drops what waits; returns when nothing runs any more. Idempotent.
  void Stop();

  void Post(uint32_t user, Length length, Task task);
  // Whether a long task waits or runs.
  bool long_pending() const;

 private:
  struct User {
    std::array<std::deque<Task>, 2> waiting;  // by length
    size_t running = 0, longs = 0;            // all, and the long ones
  };
  using Users = std::map<uint32_t, User>;

  void Run();
  bool MayRun(const User& user, Length length) const KVS_REQUIRES(mu_);
  // The user to be served now, behind the last one; end(): nobody may run anything.
  Users::iterator NextUser() KVS_REQUIRES(mu_);
  void RunOne(std::unique_lock<std::mutex>* lock) KVS_REQUIRES(mu_);

  const size_t longs_, longs_per_user_;
  mutable Mutex mu_;
  std::condition_variable wake_;
  Users users_ KVS_GUARDED_BY(mu_);
  uint32_t last_user_ KVS_GUARDED_BY(mu_) = 0;
  size_t longs_running_ KVS_GUARDED_BY(mu_) = 0;
  size_t longs_pending_ KVS_GUARDED_BY(mu_) = 0;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata
