// SPDX-License-Identifier: Apache-2.0
// CallQueue: calls of a ValueTier that wait for a thread, for implementations that carry calls out
// by blocking. It sees to deadlines and cancels of calls that wait.
//
// Calls wait in lanes, first in, first out; a lane runs one at a time. Threads are the owner's:
//
//     while (std::optional<CallQueue::Task> task = queue.Next()) queue.Run(std::move(*task));
//
// With one thread more than lanes, a call that waits ends at its deadline, or when it is cancelled,
// even while every lane is stuck. `done` runs after the lane is free for the next call.
// Thread-safety: all methods, from any thread. Cost: a look at each call that waits per task.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <optional>
#include <stop_token>
#include <vector>

#include "base/sync.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

class CallQueue {
 public:
  struct Call {
    TierCall terms;
    std::function<void(const TierCall& terms)> run;  // sets the status of every request
    std::function<void(const Status& why)> refuse;   // sets it to `why`
    Deadline not_before{};                           // it waits until then, and delays nobody
  };

 private:
  struct Wake {
    CallQueue* queue;
    void operator()() const;
  };
  struct Waiting {
    Call call;
    std::optional<std::stop_callback<Wake>> on_cancel;
  };

 public:
  // What one thread is to do next.
  class Task {
   private:
    friend class CallQueue;
    std::list<Waiting> call;  // one
    size_t lane = 0;
    Status why;  // not OK: it is refused
  };

  explicit CallQueue(size_t lanes) : lanes_(lanes) {}

  // Once it is stopped: refuses the call before it returns.
  void Add(size_t lane, Call call) KVS_EXCLUDES(mu_);
  // Waits for a task; nothing: it is stopped, and nothing waits any more.
  std::optional<Task> Next() KVS_EXCLUDES(mu_);
  // Without memory the call is refused with RESOURCE_EXHAUSTED MEMORY. Throws what `done` throws.
  void Run(Task task) KVS_EXCLUDES(mu_);
  // What waits is refused with TierStopped from now on.
  void Stop() KVS_EXCLUDES(mu_);

 private:
  struct Lane {
    std::list<Waiting> waiting;
    bool busy = false;
  };

  // The first call that ends or can begin now; nothing: none does before `*wake`.
  std::optional<Task> Take(Deadline now, Deadline* wake) KVS_REQUIRES(mu_);
  Status WhyNot(const Waiting& waiting, Deadline now) const KVS_REQUIRES(mu_);
  bool Empty() const KVS_REQUIRES(mu_);

  Mutex mu_;
  std::condition_variable changed_;
  std::vector<Lane> lanes_ KVS_GUARDED_BY(mu_);
  bool stopped_ KVS_GUARDED_BY(mu_) = false;
};

}  // namespace kvstrata
