#include "server/rpc/work_queue.h"

#include "base/check.h"

namespace kvstrata {

WorkQueue::WorkQueue(int threads) {
  KVS_CHECK(threads >= 1);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
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
  std::unique_lock lock(mu_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds is released outside the lock
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
  WorkQueue::Task task;
  {
    std::lock_guard lock(mu_);
    task = std::move(tasks_.front());
  }
  task();
  task = nullptr;
  {
    std::lock_guard lock(mu_);
    tasks_.pop_front();
    if (tasks_.empty()) return;
  }
  // Through the queue, so that sessions take turns.
  queue_->Post([self = shared_from_this()] { self->RunOne(); });
}

}  // namespace kvstrata
