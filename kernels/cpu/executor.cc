// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/executor.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/sync.h"

namespace kvstrata {
namespace {

// Between the layers of a decode step a worker is needed again within microseconds; waking it
// from sleep costs more than that.
constexpr std::chrono::microseconds kSpin{30};

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or kSpin is over.
template <typename Ready>
void SpinBriefly(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
}

class Inline final : public Executor {
 public:
  void ParallelFor(int64_t n, const std::function<void(int64_t)>& fn) override {
    for (int64_t i = 0; i < n; ++i) fn(i);
  }
  int concurrency() const override { return 1; }
};

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads) : threads_(threads) {
    // Signals of the process belong to its own threads: workers take none.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Work(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~ThreadPool() override {
    {
      MutexLock lock(mu_);
      KVS_CHECK(jobs_ == nullptr);
      stop_.store(true, std::memory_order_relaxed);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void ParallelFor(int64_t n, const std::function<void(int64_t)>& fn) override {
    if (n <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < n; ++i) fn(i);
      return;
    }
    Job job{.fn = &fn, .n = n};
    Open(job);
    RunIndices(job);
    Close(job);
  }

  int concurrency() const override { return threads_; }

 private:
  // Lives on the stack of ParallelFor. Workers join while it is listed; it goes when they have
  // left.
  struct Job {
    const std::function<void(int64_t)>* fn;
    int64_t n;
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{0};  // written under mu_
    Job* link = nullptr;          // guarded by mu_
  };

  void Open(Job& job) {
    int sleeping;
    {
      MutexLock lock(mu_);
      job.link = jobs_;
      jobs_ = &job;
      open_.fetch_add(1, std::memory_order_relaxed);
      sleeping = sleeping_;
    }
    if (sleeping == 0) return;
    if (job.n == 2) {
      wake_.notify_one();
    } else {
      wake_.notify_all();
    }
  }

  void Close(Job& job) {
    {
      MutexLock lock(mu_);
      Job** at = &jobs_;
      while (*at != &job) at = &(*at)->link;
      *at = job.link;
    }
    const auto left = [&job] { return job.workers.load(std::memory_order_acquire) == 0; };
    SpinBriefly(left);
    if (left()) return;
    MutexLock lock(mu_);
    while (!left()) Wait(left_);
  }

  void Wait(std::condition_variable& condition) KVS_REQUIRES(mu_) {
    std::unique_lock<std::mutex> held(mu_.native(), std::adopt_lock);
    condition.wait(held);
    held.release();
  }

  void RunIndices(Job& job) {
    for (;;) {
      const int64_t i = job.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= job.n) return;
      if (i == job.n - 1) open_.fetch_sub(1, std::memory_order_relaxed);
      (*job.fn)(i);
    }
  }

  void Work() {
    while (Job* job = Join()) {
      RunIndices(*job);
      MutexLock lock(mu_);
      // Released at zero: the caller may return, and the job be gone, before the notification.
      if (job->workers.fetch_sub(1, std::memory_order_release) == 1) left_.notify_all();
    }
  }

  // The next job with indices left, joined; null when the pool ends.
  Job* Join() {
    SpinBriefly([this] {
      return open_.load(std::memory_order_relaxed) > 0 || stop_.load(std::memory_order_relaxed);
    });
    MutexLock lock(mu_);
    for (;;) {
      if (stop_.load(std::memory_order_relaxed)) return nullptr;
      for (Job* job = jobs_; job != nullptr; job = job->link) {
        if (job->next.load(std::memory_order_relaxed) >= job->n) continue;
        job->workers.fetch_add(1, std::memory_order_relaxed);
        return job;
      }
      ++sleeping_;
      Wait(wake_);
      --sleeping_;
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;

  std::atomic<int> open_{0};  // jobs with indices left: what spinning workers watch
  std::atomic<bool> stop_{false};

  Mutex mu_;
  std::condition_variable wake_;  // a job opened, or stop_
  std::condition_variable left_;  // a job's last worker left it
  Job* jobs_ KVS_GUARDED_BY(mu_) = nullptr;
  int sleeping_ KVS_GUARDED_BY(mu_) = 0;
};

}  // namespace

Executor& InlineExecutor() {
  static Inline executor;
  return executor;
}

std::unique_ptr<Executor> NewThreadPool(int threads) {
  KVS_CHECK(threads >= 1);
  return std::make_unique<ThreadPool>(threads);
}

}  // namespace kvstrata
