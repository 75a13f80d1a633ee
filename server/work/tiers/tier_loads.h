// SPDX-License-Identifier: Apache-2.0
// TierLoads: reads pages of opening sequences back from a tier, in rounds.
//
// A round is a batch of one load, so that a load with much to read delays the others by a batch of
// its own and no more; while one batch is copied into pages the tier reads another. A load has no
// thread of its own: its caller asks the tier for the first batch, and the tier's thread, when it
// has copied a batch, for the next. Each ends within `load_timeout` of its request, or by the
// deadline of what a remote tier found. What is read goes through memory of the buffers: a request
// that the tier never answers keeps no page.
//
// Ownership: borrows tier and buffers. Thread-safety: all methods, from any thread; one lock of its
// own, held for a look at the queue. Errors: none; what fails is counted, and logged at most once a
// second.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <stop_token>
#include <vector>

#include "base/sync.h"
#include "server/store/pages/page_tier.h"
#include "server/telemetry/status_log.h"
#include "server/telemetry/traffic.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct TierLoadsOptions {
  uint32_t readers = 2;  // batches that the tier reads, or that are copied, at once
  // Limits a batch, but for its first value; a quarter of it where others wait for the tier.
  uint64_t batch_bytes = uint64_t{64} << 20;
  std::chrono::microseconds load_timeout{500'000};
  BytePath path = BytePath::kDiskToMemory;  // what is counted
  Timed timed = Timed::kDiskLoad;
};

// Since start.
struct TierLoadsCounters {
  uint64_t read = 0;           // values
  uint64_t refused_loads = 0;  // too many waited
  uint64_t late_loads = 0;     // ended by their deadline
};

class TierLoads {
 public:
  static constexpr size_t kMostWaiting = 256;

  // `idle` is called whenever no load waits for its next round any more, with no lock held.
  TierLoads(const TierLoadsOptions& options, ValueTier* tier, TierBuffers* buffers,
            std::function<void()> idle);

  // False: it is refused, and nothing of it is called.
  bool Add(TierLoad load) KVS_EXCLUDES(mu_);
  bool idle() const KVS_EXCLUDES(mu_);
  // Has the tier cancel what it reads, and refuses others from now on.
  void Cancel() KVS_EXCLUDES(mu_);
  // After Cancel: waits until nobody reads or copies, and ends what waits.
  void Await() KVS_EXCLUDES(mu_);
  TierLoadsCounters counters() const KVS_EXCLUDES(mu_);
  // For the last batches, from the request until it has come; 0: none has for a minute.
  double bytes_per_second() const;
  // For loads that come from now on.
  void SetTimeout(std::chrono::microseconds timeout) { load_timeout_ = timeout; }

 private:
  // A load, and the batch of it that the tier reads now.
  struct Loading {
    TierLoad load;
    Deadline deadline;
    size_t read = 0;  // keys
    std::vector<TierGet> gets;
    std::chrono::steady_clock::time_point asked;  // for these
  };
  using LoadingPtr = std::shared_ptr<Loading>;

  // A load whose round begins; none: none waits, or enough are read.
  LoadingPtr BeginRound() KVS_REQUIRES(mu_);
  // Asks the tier for a batch; false: the load ends instead.
  bool Ask(const LoadingPtr& loading) KVS_EXCLUDES(mu_);
  // The first of the keys, as many as a batch takes; at least one.
  std::vector<TierGet> PlanReads(const Loading& loading, uint64_t most_bytes);
  // A batch has come; runs in the tier's thread.
  void Came(const LoadingPtr& loading) KVS_EXCLUDES(mu_);
  // Copies the batch; whether there is more of the load to read.
  bool Take(Loading* loading) KVS_EXCLUDES(mu_);
  // REQUIRES: one of its batch failed.
  void TellFailures(const Loading& loading);
  // Ends a round and begins the next: a load that goes on waits behind the others.
  void EndRound(LoadingPtr loading, bool more) KVS_EXCLUDES(mu_);
  // This thread, which counts in `serving_`, looks at no load any more.
  void Leave() KVS_EXCLUDES(mu_);
  bool cancelled() const KVS_EXCLUDES(mu_);
  void Count(uint64_t TierLoadsCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);

  const TierLoadsOptions options_;  // but the timeout
  std::atomic<std::chrono::microseconds> load_timeout_;
  std::atomic<double> rate_ = 0;
  std::atomic<std::chrono::steady_clock::time_point> measured_{};
  ValueTier* const tier_;
  TierBuffers* const buffers_;
  const std::function<void()> idle_;
  std::stop_source end_reads_;

  mutable Mutex mu_;
  std::condition_variable ended_;
  std::deque<LoadingPtr> waiting_ KVS_GUARDED_BY(mu_);  // for their next round
  size_t rounds_ KVS_GUARDED_BY(mu_) = 0;               // loads that are read now
  size_t serving_ KVS_GUARDED_BY(mu_) = 0;              // threads that ask for or take a batch
  bool cancelled_ KVS_GUARDED_BY(mu_) = false;
  TierLoadsCounters counters_ KVS_GUARDED_BY(mu_);
  StatusLog log_;
};

}  // namespace kvstrata
