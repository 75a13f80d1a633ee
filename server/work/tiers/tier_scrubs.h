// SPDX-License-Identifier: Apache-2.0
// TierScrubs: the thread ("kvs-tier-scrub") that reads and checks every value of a tier when
// somebody asks for it, a batch whenever no open waits for the tier.
//
// Ownership: borrows what it is given. Thread-safety: all methods, from any thread. Errors:
// FAILED_PRECONDITION SCRUB_RUNNING, UNAVAILABLE DAEMON_STOPPING.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "server/store/reports/tier_scrub.h"
#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

// ValueScrub: one reading of every value of a tier, in batches, at a rate; at its end extents of
// artefacts that no record names are erased.
//
// Ownership: borrows all that it is given. Thread-safety: one thread at a time.
class ValueScrub {
 public:
  ValueScrub(TierScrub scrub, Store* store, ValueTier* tier, TierBuffers* buffers, StatusLog* log)
      : scrub_(std::move(scrub)), store_(store), tier_(tier), buffers_(buffers), log_(log) {}

  // Reads and checks a batch within `timeout`, if the rate allows one by now, and says how far it
  // is. How the scrub ended; nothing: there is more to do, from next_look() on.
  std::optional<Status> GoOn(std::chrono::microseconds timeout);
  // When a batch is due, or a look whether the scrub is still wanted.
  std::chrono::steady_clock::time_point next_look() const { return next_look_; }
  // Tells whoever asked for it; the last call.
  void End(const Status& why) { scrub_.done(why); }

 private:
  std::optional<Status> Batch(std::chrono::microseconds timeout);
  // Whether there is more to read.
  Result<bool> Plan(std::vector<TierGet>* gets, std::chrono::microseconds timeout);
  void NoteExtents(const TierGet& get);
  // Extents that no record names: it was lost, or made anew of other extents. Those that memory has
  // may have theirs yet to come.
  void EraseOrphans();

  const TierScrub scrub_;
  Store* const store_;
  ValueTier* const tier_;
  TierBuffers* const buffers_;
  StatusLog* const log_;
  TierWalk walk_;
  std::deque<TierValue> ahead_;  // found, not yet read
  ScrubProgress so_far_;
  std::unordered_set<std::string> parts_, named_;  // artefacts': found; named by their records
  std::chrono::steady_clock::time_point next_batch_, next_look_;
};

class TierScrubs {
 public:
  // `may`: whether a batch may be read now; Wake is called when that may have changed. Reads end
  // after `timeout`.
  TierScrubs(Store* store, ValueTier* tier, TierBuffers* buffers, std::function<bool()> may,
             std::chrono::microseconds timeout);
  // Refuse, and joins.
  ~TierScrubs();

  // Values that come meanwhile may be left out. One at a time. `scrub.done` is called at its end.
  Status Begin(TierScrub scrub) KVS_EXCLUDES(mu_);
  // Ends a scrub with DAEMON_STOPPING after its current batch, and refuses others.
  void Refuse() KVS_EXCLUDES(mu_);
  // Refuse, and joins. Idempotent.
  void Stop() KVS_EXCLUDES(mu_);
  void Wake() KVS_EXCLUDES(mu_);
  // For reads that begin from now on.
  void SetTimeout(std::chrono::microseconds timeout) { timeout_ = timeout; }

 private:
  void Run() KVS_EXCLUDES(mu_);
  // A scrub that may read its next batch now; null: the end.
  ValueScrub* Next() KVS_EXCLUDES(mu_);
  bool refuses() const KVS_EXCLUDES(mu_);

  Store* const store_;
  ValueTier* const tier_;
  TierBuffers* const buffers_;
  const std::function<bool()> may_;
  std::atomic<std::chrono::microseconds> timeout_;

  mutable Mutex mu_;
  std::condition_variable changed_;
  std::unique_ptr<ValueScrub> scrub_ KVS_GUARDED_BY(mu_);  // the thread alone ends it
  bool refuses_ KVS_GUARDED_BY(mu_) = false;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  StatusLog log_;
  std::thread thread_;
};

}  // namespace kvstrata
