// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/redis_threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kTimeout{1000};

// The number behind "\nFIELD:", or 0.
uint64_t FieldOf(std::string_view info, std::string_view field) {
  const std::string name = "\n" + std::string(field) + ":";
  const size_t at = info.find(name);
  if (at == std::string_view::npos) return 0;
  const char* const begin = info.data() + at + name.size();
  uint64_t number = 0;
  (void)std::from_chars(begin, info.data() + info.size(), number);
  return number;
}

constexpr const char* kClientThread = "kvs-redis-io";
constexpr const char* kWorkThread = "kvs-redis";
constexpr uint32_t kWorkerPatience = 60;  // a worker calls `done`, which may copy what came

// OpenSSL writes to sockets without MSG_NOSIGNAL.
void BlockSigpipe() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  (void)pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
}

}  // namespace

RedisMemory ParseInfo(std::string_view info) {
  RedisMemory memory;
  memory.capacity_bytes = FieldOf(info, "maxmemory");
  memory.evicted = FieldOf(info, "evicted_keys");
  if (const size_t keys = info.find("\ndb0:keys="); keys != std::string_view::npos) {
    const char* const begin = info.data() + keys + 10;
    (void)std::from_chars(begin, info.data() + info.size(), memory.entries);
  }
  // Without a value the server still counts its own tables as data.
  if (memory.entries != 0) memory.used_bytes = FieldOf(info, "used_memory_dataset");
  return memory;
}

void RedisSurvey::RunIfDue() {
  std::shared_ptr<const redis::SlotMap> map;
  {
    MutexLock lock(mu_);
    if (asked_ != 0 || due_ > Clock::now()) return;
    map = client_.Topology();
    due_ = Clock::now() + interval_;
    if (map == nullptr) return;
    asked_ = map->shards.size();
    std::erase_if(masters_, [&](const auto& known) {
      return std::ranges::none_of(
          map->shards, [&](const redis::RedisShard& shard) { return shard.master == known.first; });
    });
  }
  const auto request =
      std::make_shared<const redis::RedisRequest>(std::initializer_list<std::string_view>{"INFO"});
  for (const redis::RedisShard& shard : map->shards) {
    auto op = std::make_unique<redis::RedisOp>();
    op->request = request;
    op->at = shard.master;
    op->deadline = Clock::now() + kTimeout;
    op->done = [self = shared_from_this(), master = shard.master](redis::RedisOp& ended) {
      self->Ended(ended, master);
    };
    client_.Submit(std::move(op));
  }
}

void RedisSurvey::Ended(const redis::RedisOp& op, const redis::RedisAddress& master) {
  const bool told = op.status.ok() && op.replies.front().kind == redis::RespReply::Kind::kBulk;
  MutexLock lock(mu_);
  if (told) masters_[master] = ParseInfo(op.replies.front().text);
  if (--asked_ == 0) ++ended_;
}

RedisSurvey::Time RedisSurvey::due() const {
  MutexLock lock(mu_);
  return asked_ != 0 ? Time::max() : due_;
}

RedisMemory RedisSurvey::total() const {
  MutexLock lock(mu_);
  RedisMemory sum;
  for (const auto& [address, memory] : masters_) {
    sum.capacity_bytes += memory.capacity_bytes;
    sum.used_bytes += memory.used_bytes;
    sum.entries += memory.entries;
    sum.evicted += memory.evicted;
  }
  return sum;
}

uint64_t RedisSurvey::least_capacity() const {
  MutexLock lock(mu_);
  uint64_t least = 0;
  for (const auto& [address, memory] : masters_) {
    if (memory.capacity_bytes == 0) continue;
    least = least == 0 ? memory.capacity_bytes : std::min(least, memory.capacity_bytes);
  }
  return least;
}

uint64_t RedisSurvey::ended() const {
  MutexLock lock(mu_);
  return ended_;
}

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
  Heartbeat beat(kWorkThread, kWorkerPatience);
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
