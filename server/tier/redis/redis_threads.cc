// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/redis_threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

constexpr const char* kClientThread = "kvs-redis-io";
constexpr const char* kWorkThread = "kvs-redis";
constexpr uint32_t kPatience = 60;  // a worker calls `done`, which may copy what came

// OpenSSL writes to sockets without MSG_NOSIGNAL.
void BlockSigpipe() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  (void)pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
}

}  // namespace

RedisThreads::RedisThreads(redis::RedisClientOptions options, uint32_t workers,
                           std::chrono::milliseconds survey_interval)
    : client_(std::move(options)),
      survey_(std::make_shared<RedisSurvey>(&client_, survey_interval)) {
  try {
    client_thread_ = std::thread([this] { ServeClient(); });
    pthread_setname_np(client_thread_.native_handle(), kClientThread);
    for (uint32_t i = 0; i < std::max(workers, 1U); ++i) {
      workers_.emplace_back([this] { ServeWork(); });
      pthread_setname_np(workers_.back().native_handle(), kWorkThread);
    }
  } catch (const std::system_error&) {
    Stop();  // those that there are
    throw;
  }
}

RedisThreads::~RedisThreads() { Stop(); }

void RedisThreads::Join() {
  MutexLock lock(mu_);
  ++tiers_;
}

void RedisThreads::Leave() {
  {
    MutexLock lock(mu_);
    if (--tiers_ != 0) return;
  }
  Stop();
}

void RedisThreads::Stop() {
  client_.Stop();
  if (client_thread_.joinable()) client_thread_.join();  // its ops have ended, or are with workers
  {
    MutexLock lock(mu_);
    stopped_ = true;
    changed_.notify_all();
  }
  for (std::thread& worker : workers_) {
    if (worker.joinable()) worker.join();
  }
}

void RedisThreads::Later(std::function<void()> work) {
  MutexLock lock(mu_);
  work_.push_back(std::move(work));
  changed_.notify_one();
}

void RedisThreads::ServeClient() {
  BlockSigpipe();
  WarmUpAllocator();
  Heartbeat beat(kClientThread);
  while (client_.Wait(survey_->due())) {
    const LoopIteration iteration(&beat);
    Survive(kClientThread, [this] {
      client_.Work();
      survey_->RunIfDue();
    });
  }
}

void RedisThreads::ServeWork() {
  WarmUpAllocator();
  Heartbeat beat(kWorkThread, kPatience);
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mu_.native());
      const bool over = [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
        changed_.wait(
            lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return stopped_ || !work_.empty(); });
        if (work_.empty()) return true;
        work = std::move(work_.front());
        work_.pop_front();
        return false;
      }();
      if (over) return;
    }
    const LoopIteration iteration(&beat);
    Survive(kWorkThread, work);
  }
}

}  // namespace kvstrata
