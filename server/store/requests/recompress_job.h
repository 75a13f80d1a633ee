// SPDX-License-Identifier: Apache-2.0
// Recompression as the store sees it: what a worker is given, whom the store tells that there is
// work, what an operator sees of it. The workers are server/work's.
//
// The life of one: a commit, a report or the end of a prompt makes a sequence due -> the store
// offers it to the sink (queued) -> a worker takes it: its pages and extents are held, the series
// copied (running) -> what lies in a pool that the host cannot read, and the run reads, is copied
// to the host, unless a GPU does the run's work where it lies -> the worker runs a clone of the
// sequence's Recompressor, without any lock -> what it drafted is copied into extents and published
// with the clone as the new state, or nothing is published and nothing has changed. Decode goes on
// meanwhile; a close cancels, and who asks for that (work_requests.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/codec/codec.h"

namespace kvstrata {

// Who runs recompressions. Called under the store's lock: short, and never calls the store.
// Thread-safety: from any thread.
class RecompressSink {
 public:
  virtual ~RecompressSink() = default;
  // The sequence is due, or more of it is since it was offered. False: no room; the store offers it
  // again when OfferDue is called.
  virtual bool Offer(uint64_t sequence, int64_t releasable_bytes) = 0;
  // The sequence is gone, or its recompression was cancelled. A worker that runs it sees that by
  // itself.
  virtual void Withdraw(uint64_t sequence) = 0;
  // A build of the sequence was asked for (work_requests.h). False: no room.
  virtual bool OfferBuild(uint64_t sequence) = 0;
  virtual void WithdrawBuild(uint64_t sequence) = 0;
};

// One unit of work. Ended by PublishRecompression or AbandonRecompression, exactly once.
struct RecompressJob {
  uint64_t hold = 0;  // keeps its pages (page_references.h)
  uint64_t sequence = 0;
  uint32_t device = 0;  // device of its session
  Geometry geometry;
  std::string plan;  // the preset's name
  // Clone it, run the clone. Null: released pages are to be placed, nothing else.
  std::shared_ptr<const Recompressor> recompressor;
  // Backend, executor and gpu_packers are the worker's to fill in.
  RecompressInput input;
  uint64_t waited_us = 0;

  // What `input` points into; the pages behind it are held.
  std::vector<std::byte*> pages;
  std::vector<ExtentView> extents;
  std::vector<float> surprisal;
  std::vector<uint8_t> boundary;
  std::vector<std::shared_ptr<const std::vector<std::byte>>> descriptions;
  std::vector<std::unique_ptr<std::byte[]>> staged;  // StageRecompression
  std::shared_ptr<const std::atomic<bool>> cancelled;
};

struct RecompressResult {
  uint32_t extents = 0;         // extents of the sequence now
  uint64_t written_bytes = 0;   // bytes of new extents
  uint64_t released_bytes = 0;  // raw pages released or moved to host
};

// What `kvstrata work ls` shows: sequences whose plan has a codec and that are not at rest.
struct WorkInfo {
  uint64_t sequence = 0, session = 0;
  std::string plan;
  // "due" (the queue is full, or a failure is waited out), "queued", "running", "cancelled"; of a
  // build "build queued", "building"
  std::string state;
  uint64_t waiting_us = 0;
  int64_t releasable_bytes = 0;
  uint32_t runs = 0;      // published so far
  uint32_t failures = 0;  // in a row
  std::string error;      // why the last run failed; "" if it published
};

using SettleDone = std::function<void(const Status&)>;

inline Status WorkersStopped() {
  return Unavailable("WORK_STOPPED", "the daemon's workers have stopped");
}
inline Status WorkCancelled(uint64_t sequence) {
  return {Code::kAborted, "WORK_CANCELLED",
          "the work on sequence " + std::to_string(sequence) +
              " was cancelled, and nothing of it is left; ask for it again"};
}

}  // namespace kvstrata
