// SPDX-License-Identifier: Apache-2.0
#include "server/sockets/descriptor_closer.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <list>
#include <map>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "base/sync.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kIdle = std::chrono::seconds(2);  // then a thread without work ends

// Only a signal with a handler interrupts a wait.
void HandleSigurg() {
  static const bool handled = [] {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    action.sa_flags = SA_RESTART;
    return sigaction(SIGURG, &action, nullptr) == 0;
  }();
  KVS_CHECK(handled);
}

// Makes this thread take no signal but SIGURG.
void TakeSigurgOnly() {
  sigset_t others;
  sigfillset(&others);
  sigdelset(&others, SIGURG);
  pthread_sigmask(SIG_SETMASK, &others, nullptr);
}

}  // namespace

struct DescriptorCloser::State {
  explicit State(ClosingTimes t) : times(t) {}

  // What one thread closes now.
  struct Closing {
    pthread_t thread{};
    uint32_t user = 0;
    Clock::time_point since;
    bool late = false;
  };
  struct User {
    std::deque<UniqueFd> waiting;
    size_t closing = 0;
  };

  const ClosingTimes times;
  Mutex mu;
  std::condition_variable work, idle;
  std::map<uint32_t, User> users KVS_GUARDED_BY(mu);
  std::list<Closing> closing KVS_GUARDED_BY(mu);
  uint32_t last_user KVS_GUARDED_BY(mu) = 0;
  size_t threads KVS_GUARDED_BY(mu) = 0, idle_threads KVS_GUARDED_BY(mu) = 0;
  ClosingCounters counts KVS_GUARDED_BY(mu);
  bool stopping KVS_GUARDED_BY(mu) = false;

  // The next user, behind the last one, who may have one closed; end(): nobody.
  std::map<uint32_t, User>::iterator NextUser() KVS_REQUIRES(mu) {
    const auto may = [](const auto& entry) {
      return !entry.second.waiting.empty() && entry.second.closing < kPerUser;
    };
    const auto after = users.upper_bound(last_user);
    for (auto it = after; it != users.end(); ++it) {
      if (may(*it)) return it;
    }
    for (auto it = users.begin(); it != after; ++it) {
      if (may(*it)) return it;
    }
    return users.end();
  }

  // Sees to it that somebody takes what may be taken.
  void Staff(const std::shared_ptr<State>& self) KVS_REQUIRES(mu) {
    if (NextUser() == users.end()) return;
    if (idle_threads > 0) return work.notify_one();
    if (threads == kMaxThreads) return;
    try {
      std::thread([self] { self->Run(self); }).detach();
      ++threads;
    } catch (const std::system_error&) {
      // No thread can be had: the next Put or Tick tries again.
    }
  }

  void Run(const std::shared_ptr<State>& self) {
    TakeSigurgOnly();
    pthread_setname_np(pthread_self(), "kvs-close");
    std::unique_lock<std::mutex> lock(mu.native());
    while (AwaitWork(&lock)) CloseOne(self, &lock);
  }

  bool AwaitWork(std::unique_lock<std::mutex>* lock) KVS_NO_THREAD_SAFETY_ANALYSIS {
    ++idle_threads;
    const bool found = work.wait_for(*lock, kIdle, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
      return stopping || NextUser() != users.end();
    });
    --idle_threads;
    if (found && NextUser() != users.end()) return true;
    --threads;
    return false;
  }

  void CloseOne(const std::shared_ptr<State>& self,
                std::unique_lock<std::mutex>* lock) KVS_NO_THREAD_SAFETY_ANALYSIS {
    const auto user = NextUser();
    last_user = user->first;
    UniqueFd fd = std::move(user->second.waiting.front());
    user->second.waiting.pop_front();
    ++user->second.closing;
    const auto mine = closing.insert(closing.end(), {pthread_self(), user->first, Clock::now()});
    Staff(self);  // this thread may be gone for long
    lock->unlock();
    fd.Reset();
    lock->lock();
    if (mine->late) {
      --counts.late;
    } else {
      --counts.pending;
    }
    closing.erase(mine);
    ++counts.closed;
    if (--user->second.closing == 0 && user->second.waiting.empty()) users.erase(user);
    if (counts.pending == 0) idle.notify_all();
  }
};

DescriptorCloser::DescriptorCloser(ClosingTimes times) : state_(std::make_shared<State>(times)) {
  HandleSigurg();
}

DescriptorCloser::~DescriptorCloser() {
  MutexLock lock(state_->mu);
  state_->stopping = true;
  state_->work.notify_all();
}

void DescriptorCloser::Put(UniqueFd fd, uint32_t user) {
  if (!fd) return;
  MutexLock lock(state_->mu);
  state_->users[user].waiting.push_back(std::move(fd));
  ++state_->counts.pending;
  state_->Staff(state_);
}

bool DescriptorCloser::MayTake(uint32_t user) const {
  MutexLock lock(state_->mu);
  const auto found = state_->users.find(user);
  if (found == state_->users.end()) return true;
  const size_t all = found->second.waiting.size() + found->second.closing;
  if (all < kMaxWaiting) return true;
  // Many that close one after the other are no fault of theirs.
  const auto blocks = [&](const State::Closing& c) {
    return c.user == user && Clock::now() - c.since > state_->times.deadline;
  };
  return all < kMostWaiting && std::none_of(state_->closing.begin(), state_->closing.end(), blocks);
}

void DescriptorCloser::Tick() {
  MutexLock lock(state_->mu);
  const Clock::time_point now = Clock::now();
  for (State::Closing& c : state_->closing) {
    if (now - c.since < state_->times.deadline) continue;
    // The thread cannot end before it has taken itself from this list.
    pthread_kill(c.thread, SIGURG);
    ++state_->counts.interrupted;
    if (c.late || now - c.since < state_->times.given_up) continue;
    c.late = true;
    ++state_->counts.late;
    if (--state_->counts.pending == 0) state_->idle.notify_all();
  }
  state_->Staff(state_);
}

ClosingCounters DescriptorCloser::counters() const {
  MutexLock lock(state_->mu);
  ClosingCounters counts = state_->counts;
  for (const State::Closing& c : state_->closing) {
    if (c.late) counts.late_user = c.user;
  }
  return counts;
}

void DescriptorCloser::Await(std::chrono::steady_clock::time_point until) {
  std::unique_lock<std::mutex> lock(state_->mu.native());
  state_->idle.wait_until(
      lock, until, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return state_->counts.pending == 0; });
}

}  // namespace kvstrata
