// SPDX-License-Identifier: Apache-2.0
#include "tests/server/tier/test_queues.h"

#include <unistd.h>

#include <cerrno>

namespace kvstrata {
namespace {

using Op = IoRequest::Op;

class InlineQueue final : public IoQueue {
 public:
  Result<uint32_t> AddFile(int fd) override {
    files_.push_back(fd);
    return static_cast<uint32_t>(files_.size() - 1);
  }
  void AddMemory(std::byte*, uint64_t) override {}
  size_t Submit(std::span<const IoRequest> requests) override {
    for (const IoRequest& r : requests) {
      const int fd = files_[r.file];
      const auto offset = static_cast<off_t>(r.offset);
      ssize_t n = 0;
      if (r.op == Op::kRead) n = pread(fd, r.data, r.bytes, offset);
      if (r.op == Op::kWrite) n = pwrite(fd, r.data, r.bytes, offset);
      done_.push_back({r.tag, n < 0 ? -errno : static_cast<int32_t>(n)});
    }
    return requests.size();
  }
  size_t Wait(std::span<IoResult> results, Deadline) override {
    const size_t n = std::min(results.size(), done_.size());
    std::copy_n(done_.begin(), n, results.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<ptrdiff_t>(n));
    return n;
  }
  std::string_view name() const override { return "inline"; }

 private:
  std::vector<int> files_;
  std::deque<IoResult> done_;
};

class RecordingQueue final : public IoQueue {
 public:
  RecordingQueue(std::unique_ptr<IoQueue> upstream, IoHistory* history)
      : upstream_(std::move(upstream)), history_(history) {}
  Result<uint32_t> AddFile(int fd) override { return upstream_->AddFile(fd); }
  void AddMemory(std::byte*, uint64_t) override {}
  size_t Submit(std::span<const IoRequest> requests) override {
    const size_t n = upstream_->Submit(requests);
    for (const IoRequest& r : requests.first(n)) {
      if (r.op == Op::kRead) continue;
      IoEvent event{r.op, r.file, r.offset, {}};
      if (r.op == Op::kWrite) event.bytes.assign(r.data, r.data + r.bytes);
      history_->push_back(std::move(event));
    }
    return n;
  }
  size_t Wait(std::span<IoResult> results, Deadline deadline) override {
    return upstream_->Wait(results, deadline);
  }
  std::string_view name() const override { return "recording"; }

 private:
  const std::unique_ptr<IoQueue> upstream_;
  IoHistory* const history_;
};

class FaultyQueue final : public IoQueue {
 public:
  FaultyQueue(std::unique_ptr<IoQueue> upstream, uint32_t depth, FaultPlan* plan)
      : upstream_(std::move(upstream)), depth_(depth), plan_(plan) {}
  Result<uint32_t> AddFile(int fd) override { return upstream_->AddFile(fd); }
  void AddMemory(std::byte* base, uint64_t bytes) override { upstream_->AddMemory(base, bytes); }
  size_t Submit(std::span<const IoRequest> requests) override {
    size_t n = 0;
    for (; n < requests.size() && SubmitOne(requests[n]); ++n) {
    }
    return n;
  }
  size_t Wait(std::span<IoResult> results, Deadline deadline) override {
    if (const size_t n = Ready(results); n > 0) return n;
    if (stuck_.size() + held_.size() != 0 && in_upstream_ == 0) {
      std::unique_lock lock(plan_->mu);
      plan_->changed.wait_until(lock, deadline, [&] { return plan_->released; });
      if (!plan_->released) return 0;
    }
    if (const size_t n = Ready(results); n > 0) return n;
    const size_t n = upstream_->Wait(results, deadline);
    in_upstream_ -= n;
    return n;
  }
  std::string_view name() const override { return upstream_->name(); }

 private:
  bool SubmitOne(IoRequest r) {
    if (ready_.size() + stuck_.size() + held_.size() + in_upstream_ >= depth_) return false;
    std::optional<IoFault> fault;
    {
      std::lock_guard lock(plan_->mu);
      if (plan_->decide) fault = plan_->decide(r);
    }
    if (fault && fault->kind == IoFault::Kind::kFail) {
      ready_.push_back({r.tag, -static_cast<int32_t>(fault->value)});
      return true;
    }
    if (fault && fault->kind == IoFault::Kind::kStuck) {
      stuck_.push_back(r.tag);
      return true;
    }
    if (fault && fault->kind == IoFault::Kind::kHeld) {
      held_.push_back(r);
      return true;
    }
    if (fault) r.bytes = std::min(r.bytes, fault->value);
    if (fault && r.bytes == 0) {
      ready_.push_back({r.tag, 0});
      return true;
    }
    const size_t taken = upstream_->Submit({&r, 1});
    in_upstream_ += taken;
    return taken == 1;
  }
  size_t Ready(std::span<IoResult> results) {
    {
      std::lock_guard lock(plan_->mu);
      if (plan_->released) {
        for (const uint64_t tag : stuck_) ready_.push_back({tag, -EIO});
        stuck_.clear();
        const size_t taken = upstream_->Submit(held_);
        in_upstream_ += taken;
        held_.erase(held_.begin(), held_.begin() + static_cast<ptrdiff_t>(taken));
      }
    }
    const size_t n = std::min(results.size(), ready_.size());
    std::copy_n(ready_.begin(), n, results.begin());
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<ptrdiff_t>(n));
    return n;
  }

  const std::unique_ptr<IoQueue> upstream_;
  const uint32_t depth_;
  FaultPlan* const plan_;
  std::deque<IoResult> ready_;
  std::vector<uint64_t> stuck_;
  std::vector<IoRequest> held_;
  size_t in_upstream_ = 0;
};

}  // namespace

std::unique_ptr<IoQueue> NewInlineQueue() { return std::make_unique<InlineQueue>(); }
std::unique_ptr<IoQueue> NewRecordingQueue(std::unique_ptr<IoQueue> upstream, IoHistory* history) {
  return std::make_unique<RecordingQueue>(std::move(upstream), history);
}
std::unique_ptr<IoQueue> NewFaultyQueue(std::unique_ptr<IoQueue> upstream, uint32_t depth,
                                        FaultPlan* plan) {
  return std::make_unique<FaultyQueue>(std::move(upstream), depth, plan);
}

}  // namespace kvstrata
