// SPDX-License-Identifier: Apache-2.0
// IoQueue by threads that call pread, pwrite and fdatasync.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/tier/disk/files/io_queue.h"

namespace kvstrata {
namespace {

struct Work {
  IoRequest request;
  int fd = -1;
};

int32_t Execute(const Work& work) {
  const IoRequest& r = work.request;
  const auto offset = static_cast<off_t>(r.offset);
  for (;;) {
    ssize_t n = 0;
    switch (r.op) {
      case IoRequest::Op::kRead:
        n = pread(work.fd, r.data, r.bytes, offset);
        break;
      case IoRequest::Op::kWrite:
        n = pwrite(work.fd, r.data, r.bytes, offset);
        break;
      case IoRequest::Op::kFlush:
        n = fdatasync(work.fd);
        break;
    }
    if (n >= 0) return static_cast<int32_t>(n);
    if (errno != EINTR) return -errno;
  }
}

// What the threads and the queue share. A thread that a device does not let go outlives the queue.
struct Shared {
  Mutex mu;
  std::condition_variable work_ready, result_ready;
  std::deque<Work> waiting KVS_GUARDED_BY(mu);
  std::vector<IoResult> done KVS_GUARDED_BY(mu);
  size_t in_flight KVS_GUARDED_BY(mu) = 0;  // waiting, running or done
  bool stopping KVS_GUARDED_BY(mu) = false;
};

void RunThread(const std::shared_ptr<Shared>& shared) KVS_NO_THREAD_SAFETY_ANALYSIS {
  const auto ready = [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    return shared->stopping || !shared->waiting.empty();
  };
  std::unique_lock lock(shared->mu.native());
  for (;;) {
    shared->work_ready.wait(lock, ready);
    if (shared->waiting.empty()) return;
    const Work work = shared->waiting.front();
    shared->waiting.pop_front();
    lock.unlock();
    const int32_t result = Execute(work);
    lock.lock();
    shared->done.push_back({work.request.tag, result});
    shared->result_ready.notify_one();
  }
}

class PreadQueue final : public IoQueue {
 public:
  explicit PreadQueue(uint32_t depth) : depth_(depth) {
    for (uint32_t i = 0; i < depth; ++i) threads_.emplace_back(RunThread, shared_);
  }

  ~PreadQueue() override KVS_NO_THREAD_SAFETY_ANALYSIS {
    const auto all_done = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
      return shared_->done.size() == shared_->in_flight;
    };
    std::unique_lock lock(shared_->mu.native());
    shared_->stopping = true;
    shared_->work_ready.notify_all();
    const bool idle = shared_->result_ready.wait_for(lock, std::chrono::seconds(1), all_done);
    lock.unlock();
    for (std::thread& thread : threads_) idle ? thread.join() : thread.detach();
  }

  Result<uint32_t> AddFile(int fd) override {
    if (files_.size() == kIoFiles) {
      return ResourceExhausted("IO_FILES", "a queue takes " + std::to_string(kIoFiles) + " files");
    }
    files_.push_back(fd);
    return static_cast<uint32_t>(files_.size() - 1);
  }

  void AddMemory(std::byte*, uint64_t) override {}

  size_t Submit(std::span<const IoRequest> requests) override {
    MutexLock lock(shared_->mu);
    size_t n = 0;
    for (; n < requests.size() && shared_->in_flight < depth_; ++n) {
      shared_->waiting.push_back({requests[n], files_[requests[n].file]});
      ++shared_->in_flight;
      shared_->work_ready.notify_one();
    }
    return n;
  }

  size_t Wait(std::span<IoResult> results,
              Deadline deadline) override KVS_NO_THREAD_SAFETY_ANALYSIS {
    const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
      return !shared_->done.empty() || shared_->in_flight == 0;
    };
    std::unique_lock lock(shared_->mu.native());
    shared_->result_ready.wait_until(lock, deadline, ready);
    const size_t n = std::min(results.size(), shared_->done.size());
    const auto end = shared_->done.begin() + static_cast<ptrdiff_t>(n);
    std::copy(shared_->done.begin(), end, results.begin());
    shared_->done.erase(shared_->done.begin(), end);
    shared_->in_flight -= n;
    return n;
  }

  std::string_view name() const override { return "pread"; }

 private:
  const uint32_t depth_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::vector<int> files_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> NewPreadQueue(uint32_t depth) {
  return std::make_unique<PreadQueue>(depth);
}

}  // namespace kvstrata
