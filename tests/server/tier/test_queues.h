// SPDX-License-Identifier: Apache-2.0
// IoQueues for tests of the disk tier: one without threads, and the adaptors that record and fail.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "server/tier/disk/files/io_queue.h"

namespace kvstrata {

// Carries out a request when it is submitted. No threads: thousands of mounts a second.
std::unique_ptr<IoQueue> NewInlineQueue();

// What a disk was told, in order.
struct IoEvent {
  IoRequest::Op op = IoRequest::Op::kWrite;
  uint32_t file = 0;
  uint64_t offset = 0;
  std::vector<std::byte> bytes;
};
using IoHistory = std::vector<IoEvent>;

// Appends every write and flush to `history` before `upstream` sees it.
std::unique_ptr<IoQueue> NewRecordingQueue(std::unique_ptr<IoQueue> upstream, IoHistory* history);

// What becomes of a request, instead of being carried out.
struct IoFault {
  enum class Kind : uint8_t {
    kFail,   // `value`: the errno
    kShort,  // only `value` bytes of it are done
    kStuck,  // no answer until FaultPlan::Release, then EIO
    kHeld,   // carried out when FaultPlan::Release comes
  };
  Kind kind = Kind::kFail;
  uint32_t value = 0;
};

// Shared by the queues of one tier.
struct FaultPlan {
  std::mutex mu;
  std::condition_variable changed;
  std::function<std::optional<IoFault>(const IoRequest&)> decide;  // null: no faults
  bool released = false;                                           // stuck ones go on

  void Set(std::function<std::optional<IoFault>(const IoRequest&)> f) {
    std::lock_guard lock(mu);
    decide = std::move(f);
  }
  void Release() {
    std::lock_guard lock(mu);
    released = true;
    changed.notify_all();
  }
};
// `depth`: of the upstream; what is stuck counts.
std::unique_ptr<IoQueue> NewFaultyQueue(std::unique_ptr<IoQueue> upstream, uint32_t depth,
                                        FaultPlan* plan);

}  // namespace kvstrata
