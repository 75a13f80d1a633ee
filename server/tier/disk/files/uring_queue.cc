// SPDX-License-Identifier: Apache-2.0
// IoQueue by io_uring: sparse tables of registered files and of registered memory.
#include <liburing.h>
#include <sys/uio.h>

#include <array>
#include <cstring>
#include <map>
#include <string>

#include "server/tier/disk/files/io_queue.h"

namespace kvstrata {
namespace {

constexpr uint32_t kMemories = 1024;             // registered; more are used unregistered
constexpr uint64_t kMaxRegistered = 1ull << 30;  // the kernel's limit for one

class UringQueue final : public IoQueue {
 public:
  static Result<std::unique_ptr<IoQueue>> Create(uint32_t depth) {
    auto queue = std::unique_ptr<UringQueue>(new UringQueue(depth));
    // Completions wait for our next system call instead of interrupting; from kernel 5.19 on.
    int error = io_uring_queue_init(depth, &queue->ring_, IORING_SETUP_COOP_TASKRUN);
    if (error == -EINVAL) error = io_uring_queue_init(depth, &queue->ring_, 0);
    if (error < 0) {
      return Unavailable("IO_URING", std::string("io_uring is not available: ") +
                                         std::strerror(-error) +
                                         "; allow io_uring_setup in seccomp, or use threads");
    }
    queue->open_ = true;
    error = io_uring_register_files_sparse(&queue->ring_, kIoFiles);
    if (error < 0) {
      return Unavailable("IO_URING", std::string("io_uring registers no files: ") +
                                         std::strerror(-error) +
                                         "; kernel 5.19 or later is needed");
    }
    queue->registers_memory_ = io_uring_register_buffers_sparse(&queue->ring_, kMemories) == 0;
    return std::unique_ptr<IoQueue>(std::move(queue));
  }

  ~UringQueue() override {
    if (!open_) return;
    std::array<IoResult, 64> results;
    const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (in_flight_ > 0 && Wait(results, deadline) > 0) {
    }
    io_uring_queue_exit(&ring_);
  }

  Result<uint32_t> AddFile(int fd) override {
    if (files_ == kIoFiles) {
      return ResourceExhausted("IO_FILES", "a queue takes " + std::to_string(kIoFiles) + " files");
    }
    const int n = io_uring_register_files_update(&ring_, files_, &fd, 1);
    if (n != 1) return Internal("IO_FILES", std::string("register file: ") + std::strerror(-n));
    return files_++;
  }

  void AddMemory(std::byte* base, uint64_t bytes) override {
    if (!registers_memory_) return;
    for (uint64_t done = 0; done < bytes; done += kMaxRegistered) {
      if (!RegisterPiece({base + done, std::min(bytes - done, kMaxRegistered)})) return;
    }
  }

  size_t Submit(std::span<const IoRequest> requests) override {
    size_t n = 0;
    for (; n < requests.size() && in_flight_ < depth_; ++n) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      Prepare(requests[n], entry);
      ++in_flight_;
    }
    io_uring_submit(&ring_);  // what it did not take now, Wait submits again
    return n;
  }

  size_t Wait(std::span<IoResult> results, Deadline deadline) override {
    if (in_flight_ == 0 || results.empty()) return 0;
    for (;;) {
      if (io_uring_sq_ready(&ring_) > 0) io_uring_submit(&ring_);
      if (const size_t n = Reap(results); n > 0) return n;
      const auto left = deadline - std::chrono::steady_clock::now();
      const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
      __kernel_timespec time{};
      if (ns > 0) time = {ns / 1'000'000'000, ns % 1'000'000'000};
      io_uring_cqe* first = nullptr;
      // Also when time is over: with COOP_TASKRUN results appear in a system call only.
      io_uring_wait_cqes(&ring_, &first, 1, &time, nullptr);
      if (ns <= 0) return Reap(results);
    }
  }

  std::string_view name() const override { return "io_uring"; }

 private:
  struct Memory {
    uint64_t bytes = 0;
    uint32_t slot = 0;
  };

  explicit UringQueue(uint32_t depth) : depth_(depth) {}

  bool RegisterPiece(iovec piece) {
    const auto slot = static_cast<uint32_t>(memories_.size());
    if (slot == kMemories) return false;
    const __u64 tag = 0;
    // Fails where RLIMIT_MEMLOCK is short: the memory is used unregistered then.
    if (io_uring_register_buffers_update_tag(&ring_, slot, &piece, &tag, 1) != 1) return false;
    memories_[static_cast<std::byte*>(piece.iov_base)] = {piece.iov_len, slot};
    return true;
  }

  // The registered memory that holds all of it; null: none.
  const Memory* Registered(const std::byte* data, uint64_t bytes) const {
    auto it = memories_.upper_bound(const_cast<std::byte*>(data));
    if (it == memories_.begin()) return nullptr;
    --it;
    return data + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
  }

  void Prepare(const IoRequest& r, io_uring_sqe* entry) {
    const auto file = static_cast<int>(r.file);
    const Memory* memory = Registered(r.data, r.bytes);
    switch (r.op) {
      case IoRequest::Op::kRead:
        if (memory != nullptr) {
          io_uring_prep_read_fixed(entry, file, r.data, r.bytes, r.offset,
                                   static_cast<int>(memory->slot));
        } else {
          io_uring_prep_read(entry, file, r.data, r.bytes, r.offset);
        }
        break;
      case IoRequest::Op::kWrite:
        if (memory != nullptr) {
          io_uring_prep_write_fixed(entry, file, r.data, r.bytes, r.offset,
                                    static_cast<int>(memory->slot));
        } else {
          io_uring_prep_write(entry, file, r.data, r.bytes, r.offset);
        }
        break;
      case IoRequest::Op::kFlush:
        io_uring_prep_fsync(entry, file, IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(entry, r.tag);
  }

  size_t Reap(std::span<IoResult> results) {
    std::array<io_uring_cqe*, 64> entries;
    const auto limit = static_cast<unsigned>(std::min(results.size(), entries.size()));
    const unsigned n = io_uring_peek_batch_cqe(&ring_, entries.data(), limit);
    for (unsigned i = 0; i < n; ++i) results[i] = {entries[i]->user_data, entries[i]->res};
    io_uring_cq_advance(&ring_, n);
    in_flight_ -= n;
    return n;
  }

  const uint32_t depth_;
  io_uring ring_{};
  bool open_ = false;
  bool registers_memory_ = false;
  uint32_t files_ = 0;
  size_t in_flight_ = 0;
  std::map<std::byte*, Memory> memories_;
};

}  // namespace

Result<std::unique_ptr<IoQueue>> NewUringQueue(uint32_t depth) { return UringQueue::Create(depth); }

IoQueueChoice NewIoQueue(uint32_t depth) {
  Result<std::unique_ptr<IoQueue>> uring = NewUringQueue(depth);
  if (uring.ok()) return {std::move(*uring), OkStatus()};
  return {NewPreadQueue(depth), uring.status()};
}

}  // namespace kvstrata
