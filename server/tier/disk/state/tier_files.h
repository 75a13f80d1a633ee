// SPDX-License-Identifier: Apache-2.0
// TierFiles: the files of a disk tier and the two sides that use them: whoever holds the reader's
// lock reads, whoever holds the writer's writes.
//
// By which number the queues know a file: first the segments that there were at the start, then
// both checkpoints, then further segments. Ownership: owns the directory, the queues, and the
// memory that the queues registered, for as long as they live.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "base/sync.h"
#include "server/tier/disk/files/tier_directory.h"
#include "server/tier/disk/files/transfer_queue.h"
#include "server/tier/disk/format/format.h"
#include "server/tier/disk/state/disk_options.h"
#include "server/tier/disk/state/tier_state.h"

namespace kvstrata::disk {

// Scratch: equal pieces of block-aligned memory for headers, small values and the ends of buffers.
// A piece goes back when its last owner lets go, which for an abandoned request may be never.
// Thread-safety: one thread at a time.
class Scratch {
 public:
  // A header, and a block for the end of each buffer or all of a small value.
  static constexpr uint64_t kPieceBytes = uint64_t{1 + kMaxBuffers} * kBlockBytes;

  explicit Scratch(uint32_t pieces) : pool_(std::make_shared<Pool>(pieces)) {}

  // Null: all are in use.
  std::shared_ptr<std::byte> Take() {
    if (pool_->free.empty()) return nullptr;
    std::byte* piece = pool_->free.back();
    pool_->free.pop_back();
    return {piece, [pool = pool_](std::byte* p) { pool->free.push_back(p); }};
  }

  std::byte* base() const { return pool_->base; }
  uint64_t bytes() const { return pool_->bytes; }

 private:
  struct Pool {
    explicit Pool(uint32_t pieces)
        : bytes(pieces * kPieceBytes),
          base(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes))) {
      KVS_CHECK(base != nullptr);
      for (uint32_t i = pieces; i-- > 0;) free.push_back(base + i * kPieceBytes);
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() { std::free(base); }

    const uint64_t bytes;
    std::byte* const base;
    std::vector<std::byte*> free;
  };
  std::shared_ptr<Pool> pool_;
};

// A lock that is waited for until a deadline.
class DeadlineLock {
 public:
  bool Take(Deadline deadline) KVS_NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock lock(mu_.native());
    const auto free = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return !taken_; };
    if (!free_.wait_until(lock, deadline, free)) return false;
    taken_ = true;
    return true;
  }
  void Release() {
    MutexLock lock(mu_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  Mutex mu_;
  std::condition_variable free_;
  bool taken_ KVS_GUARDED_BY(mu_) = false;
};

class HeldSide {
 public:
  HeldSide(DeadlineLock* lock, Deadline deadline) : lock_(lock), held_(lock->Take(deadline)) {}
  HeldSide(const HeldSide&) = delete;
  HeldSide& operator=(const HeldSide&) = delete;
  ~HeldSide() {
    if (held_) lock_->Release();
  }
  bool held() const { return held_; }

 private:
  DeadlineLock* const lock_;
  const bool held_;
};

// One of the two sides: whoever holds its lock uses queue and scratch.
struct Side {
  Side(std::unique_ptr<IoQueue> queue, uint32_t depth)
      : scratch(TransferQueue::kMaxRunning + depth), transfers(std::move(queue)) {
    transfers.queue().AddMemory(scratch.base(), scratch.bytes());
  }
  DeadlineLock lock;
  Scratch scratch;
  TransferQueue transfers;
};

class TierFiles {
 public:
  TierFiles(TierState* state, TierDirectory directory, IoQueueChoice reads, IoQueueChoice writes);

  // Has both queues know the files. Once, before anything else.
  Status AddAll();
  // Segments `from` .. `to`, and checkpoints of that size. All or nothing. Both sides are held, for
  // Shrink too: segments from `segments` on go.
  Status Grow(uint32_t from, uint32_t to, uint64_t checkpoint_bytes);
  void Shrink(uint32_t segments) { ShrinkTierDirectory(segments, &directory_); }
  // At the start, once it is certain whose they are; how many files were too long.
  size_t CutLonger();
  // Those of DiskTier::AddMemory.
  Status AddMemory(std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline)
      KVS_EXCLUDES(state_->mu);

  uint32_t FileOf(uint32_t segment) const {
    return segment < first_segments_ ? segment : segment + 2;
  }
  uint32_t FileOfCheckpoint(uint64_t sequence) const {
    return first_segments_ + static_cast<uint32_t>(sequence % 2);
  }
  // Segments at the start.
  uint32_t first_segments() const { return first_segments_; }
  // For each of the checkpoints' files; with a side held.
  uint64_t checkpoint_bytes() const { return checkpoint_bytes_; }

  bool direct() const { return directory_.direct; }
  const std::string& queue_name() const { return queue_name_; }
  const Status& degraded() const { return degraded_; }

  Side& reader() { return reader_; }
  Side& writer() { return writer_; }

 private:
  // Has both queues know the files of new segments.
  Status AddNew();

  TierState* const state_;
  TierDirectory directory_;  // with both sides held, but for what is constant
  const uint32_t first_segments_;
  uint64_t checkpoint_bytes_;
  const std::string queue_name_;
  const Status degraded_;
  std::vector<std::shared_ptr<std::byte>> memory_ KVS_GUARDED_BY(state_->mu);
  Side reader_, writer_;  // each under its lock
  size_t added_ = 0;      // segments that both queues know; of both sides together
};

}  // namespace kvstrata::disk
