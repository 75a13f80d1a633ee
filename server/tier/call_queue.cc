// SPDX-License-Identifier: Apache-2.0
#include "server/tier/call_queue.h"

#include <new>
#include <utility>

namespace kvstrata {

void CallQueue::Wake::operator()() const {
  MutexLock lock(queue->mu_);  // whoever looks sees the cancel, or hears this
  queue->changed_.notify_one();
}

void CallQueue::Add(size_t lane, Call call) {
  std::list<Waiting> one;
  Waiting& waiting = one.emplace_back();
  waiting.call = std::move(call);
  const std::stop_token& cancel = waiting.call.terms.cancel;
  if (cancel.stop_possible()) waiting.on_cancel.emplace(cancel, Wake{this});
  {
    MutexLock lock(mu_);
    if (!stopped_) {
      std::list<Waiting>& all = lanes_[lane].waiting;
      all.splice(all.end(), one);
      changed_.notify_one();
      return;
    }
  }
  one.front().call.refuse(TierStopped());
  one.front().call.terms.done();
}

Status CallQueue::WhyNot(const Waiting& waiting, Deadline now) const {
  if (stopped_) return TierStopped();
  if (waiting.call.terms.cancel.stop_requested()) return TierCancelled();
  return waiting.call.terms.deadline <= now ? TierLate() : OkStatus();
}

std::optional<CallQueue::Task> CallQueue::Take(Deadline now, Deadline* wake) {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    for (auto it = lane.waiting.begin(); it != lane.waiting.end(); ++it) {
      Status why = WhyNot(*it, now);
      const bool begins = !lane.busy && it->call.not_before <= now;
      *wake = std::min(*wake, it->call.terms.deadline);
      if (it->call.not_before > now) *wake = std::min(*wake, it->call.not_before);
      if (why.ok() && !begins) continue;
      lane.busy |= why.ok();
      Task task;
      task.call.splice(task.call.end(), lane.waiting, it);
      task.lane = i;
      task.why = std::move(why);
      return task;
    }
  }
  return std::nullopt;
}

bool CallQueue::Empty() const {
  return std::ranges::all_of(lanes_, [](const Lane& lane) { return lane.waiting.empty(); });
}

std::optional<CallQueue::Task> CallQueue::Next() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> std::optional<Task> {
    for (;;) {
      Deadline wake = Deadline::max();
      std::optional<Task> task = Take(std::chrono::steady_clock::now(), &wake);
      // Another thread looks after the deadlines of what still waits.
      if (task && !Empty()) changed_.notify_one();
      if (task) return task;
      if (stopped_ && Empty()) return std::nullopt;
      if (wake == Deadline::max()) {
        changed_.wait(lock);
      } else {
        changed_.wait_until(lock, wake);
      }
    }
  }();
}

// The call's end comes without the lock: a cancel in another thread may wait for it just then.
void CallQueue::Run(Task task) {
  Call& call = task.call.front().call;
  if (task.why.ok()) {
    try {
      call.run(call.terms);
    } catch (const std::bad_alloc&) {
      call.refuse(ResourceExhausted("MEMORY", "the daemon has no memory for this"));
    }
    MutexLock lock(mu_);
    lanes_[task.lane].busy = false;
    if (!lanes_[task.lane].waiting.empty()) changed_.notify_one();
  } else {
    call.refuse(task.why);
  }
  call.terms.done();
}

void CallQueue::Stop() {
  MutexLock lock(mu_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace kvstrata
