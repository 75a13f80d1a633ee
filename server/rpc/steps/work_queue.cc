// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/steps/work_queue.h"

#include <exception>
#include <new>

#include "base/check.h"
#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

// What a task throws ends here: no thread of the queue ends by it, nor does another's task wait.
void RunTask(const WorkQueue::Task& task) {
  try {
    task();
  } catch (const std::exception& thrown) {
    LogEvent(LogLevel::kError, "task_failed", {{"why", thrown.what()}});
  }
}

}  // namespace

WorkQueue::WorkQueue(int threads, std::string_view name, uint32_t patience)
    : name_(name), patience_(patience) {
  KVS_CHECK(threads >= 1);
  threads_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    threads_.push_back(StartThread(name_.c_str(), [this] { Run(); }));
  }
}

WorkQueue::~WorkQueue() {
  {
    std::lock_guard lock(mu_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void WorkQueue::Post(Task task) {
  {
    std::lock_guard lock(mu_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void WorkQueue::Run() {
  Heartbeat beat(name_, patience_);
  std::unique_lock lock(mu_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    {
      const LoopIteration iteration(&beat);
      RunTask(task);
      task = nullptr;  // what it holds is released outside the lock
    }
    lock.lock();
  }
}

Strand::Outcome Strand::Post(WorkQueue::Task task) { return Enqueue(std::move(task), false); }

void Strand::PostLast(WorkQueue::Task task) {
  KVS_CHECK(Enqueue(std::move(task), true) == Outcome::kQueued);
}

Strand::Outcome Strand::Enqueue(WorkQueue::Task task, bool last) {
  {
    std::lock_guard lock(mu_);
    if (closed_) return Outcome::kClosed;
    if (!last && tasks_.size() >= kMaxWaiting) return Outcome::kFull;
    closed_ = last;
    tasks_.push_back(std::move(task));
    if (tasks_.size() > 1) return Outcome::kQueued;  // RunOne posts the next one
  }
  queue_->Post([self = shared_from_this()] { self->RunOne(); });
  return Outcome::kQueued;
}

void Strand::RunOne() {
  for (;;) {
    WorkQueue::Task task;
    {
      std::lock_guard lock(mu_);
      task = std::move(tasks_.front());
    }
    RunTask(task);
    task = nullptr;
    {
      std::lock_guard lock(mu_);
      tasks_.pop_front();
      if (tasks_.empty()) return;
    }
    try {  // through the queue, so that sessions are served in rotation
      return queue_->Post([self = shared_from_this()] { self->RunOne(); });
    } catch (const std::bad_alloc&) {  // then at once
    }
  }
}

}  // namespace kvstrata
