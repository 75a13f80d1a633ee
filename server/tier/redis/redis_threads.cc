// SPDX-License-Identifier: Apache-2.0
#include "server/tier/redis/redis_threads.h"

#include <pthread.h>

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

RedisThreads::RedisThreads(redis::RedisClientOptions options,
                           std::chrono::milliseconds survey_interval)
    : client_(std::move(options)),
      survey_(std::make_shared<RedisSurvey>(&client_, survey_interval)) {
  try {
    client_thread_ = std::thread([this] { ServeClient(); });
    pthread_setname_np(client_thread_.native_handle(), kClientThread);
    for (std::thread& worker : workers_) {
      worker = std::thread([this] { ServeWork(); });
      pthread_setname_np(worker.native_handle(), kWorkThread);
    }
    callers_.emplace(kWorkThread, 2, &calls_);  // one looks after deadlines
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
  callers_.reset();
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

void RedisThreads::ServeClient() KVS_NO_THREAD_SAFETY_ANALYSIS {
  WarmUpAllocator();
  Heartbeat beat(kClientThread);
  std::unique_lock<std::mutex> lock(mu_.native());
  for (bool goes_on = true; goes_on;) {
    unserved_.wait(lock,
                   [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return !serving_ && Unwaited(); });
    serving_ = true;
    lock.unlock();
    goes_on = client_.Wait(survey_->due());
    {
      const LoopIteration iteration(&beat);
      Work();
    }
    lock.lock();
    serving_ = false;
    served_.notify_all();
  }
}

void RedisThreads::Work() {
  Survive(kClientThread, [this] {
    client_.Work();
    survey_->RunIfDue();
  });
}

void RedisThreads::ServeOnce(std::unique_lock<std::mutex>* lock, bool waits) {
  if (serving_ || Unwaited()) {
    if (!serving_) unserved_.notify_one();
    if (waits) served_.wait(*lock);
    return;
  }
  serving_ = true;
  lock->unlock();
  (void)client_.Wait(waits ? survey_->due() : Deadline{});
  Work();
  lock->lock();
  serving_ = false;
  served_.notify_all();
  if (Unwaited()) unserved_.notify_one();
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

RedisOps::RedisOps(RedisThreads* threads, const std::stop_token& cancel)
    : threads_(*threads), on_cancel_(cancel, Wake{threads}) {
  MutexLock lock(threads_.mu_);
  ++threads_.waiting_;
}

RedisOps::~RedisOps() KVS_NO_THREAD_SAFETY_ANALYSIS {
  std::unique_lock<std::mutex> lock(threads_.mu_.native());
  while (!under_way_.empty()) threads_.ServeOnce(&lock, true);
  --threads_.waiting_;
  threads_.unserved_.notify_one();
}

void RedisOps::Submit(std::unique_ptr<redis::RedisOp> op, Handler handler) {
  List one;
  one.emplace_back().second = std::move(handler);
  op->done = [this, it = one.begin()](redis::RedisOp& ended) {
    it->first.status = std::move(ended.status);
    it->first.replies = std::move(ended.replies);
    it->first.answered_by = std::move(ended.answered_by);
    MutexLock lock(threads_.mu_);
    --threads_.awaited_;
    ended_.splice(ended_.end(), under_way_, it);
    threads_.served_.notify_all();
  };
  ++size_;
  {
    MutexLock lock(threads_.mu_);
    ++threads_.awaited_;
    under_way_.splice(under_way_.end(), one);
  }
  threads_.client().Submit(std::move(op));
}

redis::RedisOp RedisOps::Ask(std::unique_ptr<redis::RedisOp> op) {
  redis::RedisOp answer;
  Submit(std::move(op), [&answer](redis::RedisOp& ended) { answer = std::move(ended); });
  Handle(true);
  return answer;
}

void RedisOps::Handle(bool waits) KVS_NO_THREAD_SAFETY_ANALYSIS {
  List ended;
  {
    std::unique_lock<std::mutex> lock(threads_.mu_.native());
    if (ended_.empty()) threads_.ServeOnce(&lock, waits);
    while (waits && ended_.empty()) threads_.ServeOnce(&lock, true);
    ended.swap(ended_);
  }
  size_ -= ended.size();
  for (auto& [op, handler] : ended) handler(op);
}

}  // namespace kvstrata
