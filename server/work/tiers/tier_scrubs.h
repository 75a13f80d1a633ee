// SPDX-License-Identifier: Apache-2.0
// TierScrubs: the thread ("kvs-tier-scrub") that reads and checks every value of a tier when
// somebody asks for it, a batch whenever no open waits for the tier.
//
// Ownership: borrows what it is given. Thread-safety: all methods, from any thread. Errors:
// FAILED_PRECONDITION SCRUB_RUNNING, UNAVAILABLE DAEMON_STOPPING.
#ifndef KVSTRATA_SERVER_WORK_TIERS_TIER_SCRUBS_H_
#define KVSTRATA_SERVER_WORK_TIERS_TIER_SCRUBS_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <thread>

#include "base/sync.h"
#include "server/store/reports/tier_scrub.h"
#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"
#include "server/work/tiers/value_scrub.h"

namespace kvstrata {

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

#endif  // KVSTRATA_SERVER_WORK_TIERS_TIER_SCRUBS_H_
