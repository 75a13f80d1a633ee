// SPDX-License-Identifier: Apache-2.0
// ValueScrub: one reading of every value of a tier, in batches, at a rate; at its end extents of
// artefacts that no record names are erased.
//
// Ownership: borrows all that it is given. Thread-safety: one thread at a time.
#ifndef KVSTRATA_SERVER_WORK_TIERS_VALUE_SCRUB_H_
#define KVSTRATA_SERVER_WORK_TIERS_VALUE_SCRUB_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "server/store/reports/tier_scrub.h"
#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_TIERS_VALUE_SCRUB_H_
