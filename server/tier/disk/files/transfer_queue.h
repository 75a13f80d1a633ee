// SPDX-License-Identifier: Apache-2.0
// TransferQueue: runs many transfers, each of a few requests, over one IoQueue, and keeps it full.
//
// A transfer's requests are in flight together, submitted in their order. Short reads and writes
// are continued; a request that makes no progress fails with EIO. Deadlines: when one passes, every
// transfer still running ends with ETIMEDOUT. Requests that the device has not answered are
// *abandoned*: they hold the transfer's memory (`keep`) until it does, and a place in the queue.
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "server/tier/disk/files/io_queue.h"

namespace kvstrata::disk {

// How a transfer ended, and which request ended it.
struct IoOutcome {
  int error = 0;  // an errno; 0: all of it was done
  // For the first request that failed; nothing after ETIMEDOUT.
  IoRequest::Op op = IoRequest::Op::kRead;
  uint64_t offset = 0;
  uint32_t wanted_bytes = 0, done_bytes = 0;
};

struct Transfer {
  std::vector<IoRequest> requests;  // tags are set by the queue
  std::shared_ptr<void> keep;       // owns the memory that the requests name
  // Called once, when all requests have completed.
  std::function<void(const IoOutcome& outcome)> done;
};

class TransferQueue {
 public:
  static constexpr uint32_t kMaxRunning = 64;
  static constexpr uint32_t kPieceBytes = 512 << 10;  // larger requests are cut

  explicit TransferQueue(std::unique_ptr<IoQueue> queue) : queue_(std::move(queue)) {}
  ~TransferQueue();

  // Runs transfers until `more` has none and all have ended, or the deadline passes.
  using Source = std::function<std::optional<Transfer>()>;
  void Run(const Source& more, Deadline deadline);

  // One transfer.
  IoOutcome RunOne(std::vector<IoRequest> requests, std::shared_ptr<void> keep, Deadline deadline);

  IoQueue& queue() { return *queue_; }

 private:
  struct Running {
    Transfer transfer;
    uint32_t waiting = 0;  // requests not completed
    IoOutcome outcome;
  };
  struct Pending {
    IoRequest request;  // what is left of it
    uint32_t wanted_bytes = 0;
    std::list<Running>::iterator owner;
    uint32_t retries = 0;
  };

  void Enter(std::list<Running>::iterator running);
  bool Collect(Deadline deadline);
  void Complete(const IoResult& result);
  void CompletedOne(std::list<Running>::iterator running, const IoOutcome& outcome);
  void Abandon();

  const std::unique_ptr<IoQueue> queue_;
  uint64_t next_tag_ = 0;
  std::list<Running> running_;
  std::vector<IoRequest> to_submit_;
  std::unordered_map<uint64_t, Pending> pending_;  // pieces of running transfers
  std::unordered_map<uint64_t, std::shared_ptr<void>> abandoned_;
};

}  // namespace kvstrata::disk
