// SPDX-License-Identifier: Apache-2.0
#include "server/attach/fair_queue.h"

#include <string>
#include <system_error>
#include <utility>

#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

constexpr uint32_t kPatience = 15;  // for the largest request, on a slow core

}  // namespace

Status FairQueue::Start() {
  try {
    threads_.reserve(longs_ + 1);
    while (threads_.size() < longs_ + 1) {
      threads_.push_back(StartThread("kvs-long", [this] { Run(); }));
    }
  } catch (const std::system_error& error) {
    return ResourceExhausted("THREADS", std::string("cannot make a thread: ") + error.what() +
                                            "; raise RLIMIT_NPROC or the cgroup's pids.max");
  }
  return OkStatus();
}

void FairQueue::Stop() {
  Users dropped;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    for (auto& [id, user] : users_) {
      longs_pending_ -= user.waiting[static_cast<size_t>(Length::kLong)].size();
      std::swap(dropped[id].waiting, user.waiting);
    }
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void FairQueue::Post(uint32_t user, Length length, Task task) {
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    users_[user].waiting[static_cast<size_t>(length)].push_back(std::move(task));
    longs_pending_ += length == Length::kLong;
  }
  wake_.notify_one();
}

bool FairQueue::long_pending() const {
  MutexLock lock(mu_);
  return longs_pending_ != 0;
}

bool FairQueue::MayRun(const User& user, Length length) const {
  if (user.waiting[static_cast<size_t>(length)].empty()) return false;
  return length == Length::kShort || (longs_running_ < longs_ && user.longs < longs_per_user_);
}

FairQueue::Users::iterator FairQueue::NextUser() {
  const auto after = users_.upper_bound(last_user_);
  const auto find = [this](Users::iterator from, Users::iterator to) KVS_NO_THREAD_SAFETY_ANALYSIS {
    while (from != to && !MayRun(from->second, Length::kShort) &&
           !MayRun(from->second, Length::kLong)) {
      ++from;
    }
    return from;
  };
  const auto later = find(after, users_.end());
  if (later != users_.end()) return later;
  const auto earlier = find(users_.begin(), after);
  return earlier == after ? users_.end() : earlier;
}

void FairQueue::Run() {
  Heartbeat beat("kvs-long", kPatience);
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    return stopping_ || NextUser() != users_.end();
  };
  [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    for (wake_.wait(lock, ready); !stopping_; wake_.wait(lock, ready)) {
      const LoopIteration iteration(&beat);
      RunOne(&lock);
    }
  }();
}

void FairQueue::RunOne(std::unique_lock<std::mutex>* lock) {
  const auto user = NextUser();
  last_user_ = user->first;
  const Length length = MayRun(user->second, Length::kShort) ? Length::kShort : Length::kLong;
  const size_t is_long = length == Length::kLong;
  std::deque<Task>& waiting = user->second.waiting[static_cast<size_t>(length)];
  Task task = std::move(waiting.front());
  waiting.pop_front();
  ++user->second.running;
  user->second.longs += is_long;
  longs_running_ += is_long;
  lock->unlock();
  task();
  task = nullptr;  // what it holds goes without the lock
  lock->lock();
  --user->second.running;
  user->second.longs -= is_long;
  longs_running_ -= is_long;
  longs_pending_ -= is_long;
  if (is_long != 0) wake_.notify_one();  // another may begin now
  const auto& left = user->second.waiting;
  if (left[0].empty() && left[1].empty() && user->second.running == 0) users_.erase(user);
}

}  // namespace kvstrata
