// SPDX-License-Identifier: Apache-2.0
#include "server/work/tensor_releases.h"

#include <condition_variable>
#include <deque>
#include <system_error>
#include <thread>

#include "base/sync.h"

namespace kvstrata {

using Clock = std::chrono::steady_clock;

struct TensorReleases::State {
  explicit State(std::chrono::milliseconds d) : deadline(d) {}
  const std::chrono::milliseconds deadline;

  Mutex mu;
  std::condition_variable idle;
  std::deque<std::unique_ptr<TensorMemory>> waiting KVS_GUARDED_BY(mu);
  size_t pending KVS_GUARDED_BY(mu) = 0;
  size_t late KVS_GUARDED_BY(mu) = 0;
  uint64_t worker KVS_GUARDED_BY(mu) = 0;  // the number of the thread that takes; those before it
                                           // were given up
  bool working KVS_GUARDED_BY(mu) = false;
  Clock::time_point since KVS_GUARDED_BY(mu);  // it destroys what it destroys now

  void StartLocked(const std::shared_ptr<State>& self) KVS_REQUIRES(mu) {
    if (working || waiting.empty()) return;
    try {
      std::thread([self, number = ++worker] { self->Run(number); }).detach();
      working = true;
      since = Clock::now();
    } catch (const std::system_error&) {
      // No thread can be had: the next Put or GiveUpLate tries again.
    }
  }

  void Run(uint64_t number) {
    for (;;) {
      std::unique_ptr<TensorMemory> memory;
      {
        MutexLock lock(mu);
        if (number != worker) return;
        if (waiting.empty()) {
          working = false;
          return;
        }
        memory = std::move(waiting.front());
        waiting.pop_front();
        since = Clock::now();
      }
      memory.reset();
      MutexLock lock(mu);
      if (number != worker) --late;  // it was given up, and came back
      if (--pending == 0) idle.notify_all();
    }
  }
};

TensorReleases::TensorReleases(std::chrono::milliseconds deadline)
    : state_(std::make_shared<State>(deadline)) {}

void TensorReleases::Put(TensorMemory* memory) {
  MutexLock lock(state_->mu);
  state_->waiting.emplace_back(memory);
  ++state_->pending;
  state_->StartLocked(state_);
}

size_t TensorReleases::GiveUpLate() {
  MutexLock lock(state_->mu);
  if (state_->working && Clock::now() - state_->since > state_->deadline) {
    ++state_->worker;
    ++state_->late;
    state_->working = false;
  }
  state_->StartLocked(state_);
  return state_->late;
}

size_t TensorReleases::pending() const {
  MutexLock lock(state_->mu);
  return state_->pending;
}

void TensorReleases::Await(Clock::time_point until) {
  std::unique_lock<std::mutex> lock(state_->mu.native());
  state_->idle.wait_until(lock, until,
                          [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return state_->pending == 0; });
}

}  // namespace kvstrata
