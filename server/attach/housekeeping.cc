// SPDX-License-Identifier: Apache-2.0
#include "server/attach/housekeeping.h"

#include <chrono>
#include <new>

#include "server/telemetry/thread_top.h"

namespace kvstrata {

void Housekeeping::TickCloser() {
  state_->closer.Tick();
  const ClosingCounters counts = state_->closer.counters();
  if (counts.late > late_closings_) {
    LogEvent(LogLevel::kError, "descriptor_close_late",
             {{"descriptors", counts.late},
              {"uid", counts.late_user},
              {"why",
               "descriptors that this user's clients passed do not close; they keep a thread "
               "each"}});
  }
  late_closings_ = counts.late;
}

void Housekeeping::KeepHouse() {
  if (under_way_.exchange(true)) return;
  const auto work = [this] {
    Survive("kvs-long", [this] {
      if (state_->store->inspection().Counters().retired_bytes != 0) {
        state_->counts.Count(AttachCounts::kReclaims);
        state_->store->references().Reclaim();
      }
      state_->store->pins().ExpirePins();
      state_->store->leases().ExpireLeases(std::chrono::steady_clock::now());
    });
    under_way_.store(false);
  };
  try {
    state_->queue.Post(kNoUser, FairQueue::Length::kShort, work);
  } catch (const std::bad_alloc&) {
    under_way_.store(false);  // the next tick tries again
  }
}

}  // namespace kvstrata
