// SPDX-License-Identifier: Apache-2.0
// WorkQueue: the threads that run steps and moves, so that gRPC's own threads only pass messages
// on; the daemon has one of one thread for opens that copy prefixes between devices. Strand: tasks
// that run one after another, in order, on a queue's threads: one per remote session, so that what
// a session keeps needs no lock and a slow session holds up nobody but itself.
//
// Ownership: strands may outlive their owner's handle; queued tasks keep them alive. The queue
// outlives all strands' tasks. Tasks must not wait for other tasks. What one throws is
// logged (`task_failed`) and ends it alone: who waits for its answer must get it before.
// Threads: all methods from any thread; each of the queue's has its name and a heartbeat
// (thread_top.h), a task being an iteration. Cost: a task is one allocation and at most one
// wake-up.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace kvstrata {

class WorkQueue {
 public:
  using Task = std::function<void()>;

  // REQUIRES: threads >= 1; `name` has at most 15 bytes. `patience`: a task's, as a Heartbeat's.
  explicit WorkQueue(int threads, std::string_view name = "kvs-grpc-work", uint32_t patience = 60);
  // Runs what is queued, then joins.
  ~WorkQueue();

  void Post(Task task);

 private:
  void Run();

  const std::string name_;
  const uint32_t patience_;
  std::mutex mu_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;  // guarded by mu_
  bool stopping_ = false;   // guarded by mu_
  std::vector<std::thread> threads_;
};

class Strand : public std::enable_shared_from_this<Strand> {
 public:
  static constexpr size_t kMaxWaiting = 256;

  explicit Strand(WorkQueue* queue) : queue_(queue) {}

  enum class Outcome { kQueued, kFull, kClosed };

  // kFull: kMaxWaiting tasks wait. kClosed: after PostLast. `task` is dropped then.
  Outcome Post(WorkQueue::Task task);
  // Always queued; nothing is taken after it. Called at most once.
  void PostLast(WorkQueue::Task task);

 private:
  Outcome Enqueue(WorkQueue::Task task, bool last);
  void RunOne();

  WorkQueue* const queue_;
  std::mutex mu_;
  std::deque<WorkQueue::Task> tasks_;  // guarded by mu_; the front one runs
  bool closed_ = false;                // guarded by mu_
};

}  // namespace kvstrata
