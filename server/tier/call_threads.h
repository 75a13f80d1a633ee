// SPDX-License-Identifier: Apache-2.0
// CallThreads: the threads that carry out what a CallQueue has (server/tier/call_queue.h), for the
// tiers whose calls block. A call that throws ends alone (telemetry/thread_top.h), and a thread
// that stays in one for too long is told (telemetry/thread_top.h).
//
// Ownership: borrows the queue. Thread-safety: made and destroyed by the queue's owner. Blocking:
// the end waits for the calls that run.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "base/status.h"
#include "server/tier/call_queue.h"

namespace kvstrata {

// CallQueue::Call::refuse of requests that have a status.
template <typename Request>
std::function<void(const Status&)> Refusing(std::span<Request> requests) {
  return [requests](const Status& why) {
    for (Request& request : requests) request.status = why;
  };
}

class CallThreads {
 public:
  // `name`: of each thread and heartbeat, a literal of at most 15 characters. Throws what
  // std::thread does where there is no thread to have; the queue is stopped then.
  CallThreads(const char* name, size_t count, CallQueue* queue);
  // Stops the queue, and waits.
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

 private:
  void Serve();
  void StopAndJoin();

  const char* const name_;
  CallQueue* const queue_;
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata
