// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/verified_hits.h"

#include <atomic>
#include <chrono>

#include "base/sync.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

struct HitCounts {
  std::atomic<uint64_t> equal{0}, different{0};
  Mutex mu;
  LogLimiter lines KVS_GUARDED_BY(mu){kMismatchBurst};
};

HitCounts& AllHits() {
  static HitCounts* const counts = new HitCounts;
  return *counts;
}

}  // namespace

void NoteVerifiedHit(const VerifiedHit& hit) {
  HitCounts& all = AllHits();
  (hit.equal ? all.equal : all.different).fetch_add(1, std::memory_order_relaxed);
  if (hit.equal) return;
  uint64_t suppressed = 0;
  {
    MutexLock lock(all.mu);
    const auto window =
        std::chrono::steady_clock::now().time_since_epoch() / std::chrono::seconds(10);
    if (!all.lines.Allow(window, &suppressed)) return;
  }
  LogEvent(LogLevel::kError, "hit_mismatch",
           {{"session", hit.session},
            {"sequence", hit.sequence},
            {"first", hit.first},
            {"tokens", hit.tokens},
            {"suppressed", suppressed}});
}

uint64_t VerifiedHits(bool equal) {
  return (equal ? AllHits().equal : AllHits().different).load(std::memory_order_relaxed);
}

}  // namespace kvstrata
