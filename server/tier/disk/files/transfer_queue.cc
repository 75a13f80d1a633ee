// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/files/transfer_queue.h"

#include <algorithm>
#include <array>
#include <cerrno>

namespace kvstrata::disk {
namespace {

constexpr uint32_t kMaxRetries = 16;  // retries after EAGAIN and EINTR
constexpr size_t kSubmitAt = 8;       // requests for one system call
constexpr size_t kCollect = 16;       // results to look at before the queue is filled again
constexpr uint32_t kSector = 512;     // a short transfer ends at one, or O_DIRECT cannot go on

// Memory that a device may still write to when its queue is gone stays for the life of the process.
void KeepForGood(std::unordered_map<uint64_t, std::shared_ptr<void>> memory) {
  static auto* kept = new std::vector<std::unordered_map<uint64_t, std::shared_ptr<void>>>;
  kept->push_back(std::move(memory));
}

}  // namespace

TransferQueue::~TransferQueue() {
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (!abandoned_.empty() && Collect(deadline)) {
  }
  if (!abandoned_.empty()) KeepForGood(std::move(abandoned_));
}

void TransferQueue::Enter(std::list<Running>::iterator running) {
  for (IoRequest r : running->transfer.requests) {
    for (bool first = true; first || r.bytes > 0; first = false) {
      IoRequest piece = r;
      piece.bytes = std::min(r.bytes, kPieceBytes);
      piece.tag = next_tag_++;
      r.bytes -= piece.bytes;
      r.offset += piece.bytes;
      if (r.data != nullptr) r.data += piece.bytes;
      pending_.emplace(piece.tag, Pending{piece, piece.bytes, running});
      to_submit_.push_back(piece);
      ++running->waiting;
    }
  }
}

void TransferQueue::Run(const Source& more, Deadline deadline) {
  const auto submit = [this] {
    if (to_submit_.empty()) return;
    const size_t taken = queue_->Submit(to_submit_);
    to_submit_.erase(to_submit_.begin(), to_submit_.begin() + static_cast<ptrdiff_t>(taken));
  };
  bool exhausted = false;
  for (;;) {
    while (!exhausted && running_.size() < kMaxRunning && to_submit_.size() < kMaxRunning) {
      std::optional<Transfer> transfer = more();
      exhausted = !transfer.has_value();
      if (exhausted) break;
      running_.push_back({std::move(*transfer)});
      Enter(std::prev(running_.end()));
      if (to_submit_.size() >= kSubmitAt) submit();
    }
    if (running_.empty()) return;
    submit();
    if (!Collect(deadline)) break;
  }
  Abandon();
  while (!exhausted) {
    const std::optional<Transfer> transfer = more();
    exhausted = !transfer.has_value();
    if (!exhausted) transfer->done({ETIMEDOUT});
  }
}

IoOutcome TransferQueue::RunOne(std::vector<IoRequest> requests, std::shared_ptr<void> keep,
                                Deadline deadline) {
  IoOutcome outcome;
  std::optional<Transfer> only =
      Transfer{std::move(requests), std::move(keep), [&](const IoOutcome& how) { outcome = how; }};
  Run([&] { return std::exchange(only, std::nullopt); }, deadline);
  return outcome;
}

bool TransferQueue::Collect(Deadline deadline) {
  std::array<IoResult, kCollect> results;
  const size_t n = queue_->Wait(results, deadline);
  for (size_t i = 0; i < n; ++i) Complete(results[i]);
  return n > 0;
}

void TransferQueue::Complete(const IoResult& result) {
  if (abandoned_.erase(result.tag) > 0) return;
  const auto it = pending_.find(result.tag);
  KVS_CHECK(it != pending_.end());
  Pending& pending = it->second;
  IoRequest& r = pending.request;
  int error = 0;
  if (result.result == -EAGAIN || result.result == -EINTR) {
    if (pending.retries++ < kMaxRetries) return to_submit_.push_back(r);
    error = EIO;
  } else if (result.result < 0) {
    error = -result.result;
  } else if (const auto done = static_cast<uint32_t>(result.result); done < r.bytes) {
    if (done > 0 && done % kSector == 0) {
      r.data += done;
      r.offset += done;
      r.bytes -= done;
      return to_submit_.push_back(r);
    }
    error = EIO;
  }
  const auto owner = pending.owner;
  IoOutcome outcome;
  if (error != 0) {
    // What was done before the error; a result that moves nothing leaves its bytes undone.
    const uint32_t done =
        pending.wanted_bytes - r.bytes + static_cast<uint32_t>(std::max<int32_t>(result.result, 0));
    outcome = {error, r.op, r.offset + r.bytes - pending.wanted_bytes, pending.wanted_bytes, done};
  }
  pending_.erase(it);
  CompletedOne(owner, outcome);
}

void TransferQueue::CompletedOne(std::list<Running>::iterator running, const IoOutcome& outcome) {
  if (running->outcome.error == 0) running->outcome = outcome;
  if (--running->waiting > 0) return;
  running->transfer.done(running->outcome);
  running_.erase(running);
}

void TransferQueue::Abandon() {
  for (const IoRequest& r : to_submit_) pending_.erase(r.tag);
  to_submit_.clear();
  for (const auto& [tag, pending] : pending_) abandoned_[tag] = pending.owner->transfer.keep;
  pending_.clear();
  for (Running& running : running_) running.transfer.done({ETIMEDOUT});
  running_.clear();
}

}  // namespace kvstrata::disk
