// SPDX-License-Identifier: Apache-2.0
// ChunkTiers: chunks in the tiers below memory: the local disk, then what nodes share.
//
// A chunk is a value of one buffer under "chunk/" and its key. Find asks what this process knows of
// the disk; a remote tier must be asked. Reads go to the first tier that has the chunk, and to the
// next if that one's copy is damaged or gone; sums are made as they come, if other tiers are to get
// the chunk. A tier has a few calls at a time, so that the deadline of each is from when its turn
// came, however much was asked for before it. When one is late, so is all that waits.
//
// Ownership: borrows the tiers, which outlive it; what is under way when it goes ends later, and
// keeps what it needs. Thread-safety: all methods, from any thread; nothing blocks. Errors: none,
// but what is told to the inbox as not ok.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "server/chunks/room/chunk_work.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

// ChunkSums: the thread ("kvs-chunk-sums") that makes the sums of chunks: when they are complete,
// and again before they are written below.
//
// Ownership: what it works on keeps its memory. Thread-safety: all methods, from any thread; the
// destructor waits for the chunk that is being summed. Cost of a chunk: a read of its bytes.
class ChunkSums {
 public:
  // THREADS (RESOURCE_EXHAUSTED) as std::system_error.
  explicit ChunkSums(std::shared_ptr<ChunkInbox> inbox);
  ~ChunkSums();

  // REQUIRES: kSum or kVerify.
  void Add(ChunkWork work) KVS_EXCLUDES(mu_);

 private:
  void Run();
  // False: the end.
  bool Next(ChunkWork* work) KVS_EXCLUDES(mu_);

  const std::shared_ptr<ChunkInbox> inbox_;
  Mutex mu_;
  std::condition_variable wake_;
  std::deque<ChunkWork> waiting_ KVS_GUARDED_BY(mu_);
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

struct ChunkTiersOptions {
  ValueTier* disk = nullptr;        // null: there is none
  ValueTier* remote = nullptr;      // null: there is none
  uint8_t write_shown = kNowhere;   // the tiers that get a chunk when it is shown
  uint8_t write_reused = kNowhere;  // and those that get it when it is found again
  std::chrono::microseconds probe_timeout{200'000};
  std::chrono::microseconds read_timeout{10'000'000};  // one call takes no longer
  uint64_t read_bytes = uint64_t{64} << 20;            // a call reads so much, or one chunk
  std::chrono::microseconds write_timeout{60'000'000};
};

class ChunkTiers {
 public:
  ChunkTiers(const ChunkTiersOptions& options, std::shared_ptr<ChunkInbox> inbox);
  ~ChunkTiers();
  ChunkTiers(const ChunkTiers&) = delete;
  ChunkTiers& operator=(const ChunkTiers&) = delete;

  bool any() const { return options_.disk != nullptr || options_.remote != nullptr; }
  // Sets `there` and `maybe`.
  void Find(std::span<ChunkFind> finds) const;
  // REQUIRES: kWrite, kProbe or kRead, of tiers that there are.
  void Start(std::vector<ChunkWork> work) const;

 private:
  struct Calls;
  const ChunkTiersOptions options_;
  const std::shared_ptr<Calls> calls_;
};

}  // namespace kvstrata
