// SPDX-License-Identifier: Apache-2.0
// WriteQueue: what is to go into one tier, by policy, and waits to be written; and what becomes of
// it when the queue is full, is drained or stops.
//
// A key waits once: it is copied as it is when its turn comes. Bounds are a number of keys and the
// bytes that they stand for; each tenant may have a rate. An offer that goes beyond is left, and
// counted. One thread takes offers, any thread makes them.
//
// Thread-safety: all methods, from any thread; one lock of its own, held for a look at the queue.
// Blocking: Take and Pace alone.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <unordered_set>
#include <vector>

#include "base/sync.h"
#include "server/store/pages/page_tier.h"
#include "server/tier/value_tier.h"
#include "server/work/rates/tenant_rates.h"
#include "server/work/tiers/recent_keys.h"

namespace kvstrata {

// What goes into a tier. kSealed: all that is sealed or was loaded from elsewhere. kAll: all that
// is sealed, and what is used again, as far as the tier is not known to have it. kReused: what
// another sequence opened on, what is pinned, and artefacts.
enum class TierWrite : uint8_t { kSealed, kReused, kAll, kOff };

class WritePolicy {
 public:
  // `known`: what a tier is known to have that is asked; null: it is not asked.
  WritePolicy(TierWrite write, const KnownKeys* known) : write_(write), known_(known) {}
  void Set(TierWrite write) { write_ = write; }
  bool Wants(const TierOffer& offer) const;

 private:
  std::atomic<TierWrite> write_;
  const KnownKeys* const known_;
};

struct WriteQueueOptions {
  TierWrite write = TierWrite::kSealed;
  uint32_t queue = 65536;                                       // keys that may wait
  uint64_t queue_bytes = std::numeric_limits<uint64_t>::max();  // that these may stand for
  TenantRatesOptions tenant_rates;                              // bytes a second of what is offered
};

// Since start, but for what waits; pages, index blocks, extents and records of artefacts alike.
struct WriteQueueCounters {
  uint64_t waiting = 0, waiting_bytes = 0;  // offers that wait or are being written, now
  uint64_t dropped_full = 0;                // the queue had no room
  uint64_t dropped_rate = 0;                // its tenant had offered as much as its rate allows
  uint64_t dropped_stop = 0;                // the daemon stopped
  uint64_t refused = 0;                     // offers while it was drained
  TenantRates::Refused over_write_rates;    // dropped_rate by tenant
};

class WriteQueue {
 public:
  struct Offered {
    PageKey key{};
    PageKey place{};
    uint64_t bytes = 0;
    OfferedFor why = OfferedFor::kSealed;
    std::chrono::steady_clock::time_point since;
  };

  // `known`: as WritePolicy's.
  WriteQueue(const WriteQueueOptions& options, const KnownKeys* known);

  // What the policy does not want is left. May be called under the store's lock.
  void Offer(const TierOffer& offer) KVS_EXCLUDES(mu_);
  // Policy and rates, for offers from now on.
  void Configure(const WriteQueueOptions& options) KVS_EXCLUDES(mu_);

  // For the thread that writes: waits for some, first of those that were put back; nothing: the
  // end, with what waits dropped. None: a drain waits for its checkpoint.
  std::optional<std::vector<Offered>> Take() KVS_EXCLUDES(mu_);
  // One that was taken waits again, and comes back in a short while.
  void PutBack(const Offered& offered) KVS_EXCLUDES(mu_);
  // All that were taken and not put back were written, or left.
  void NoteWritten() KVS_EXCLUDES(mu_);

  // Takes no more offers, and drops what waits. False: it has been told before.
  bool Stop() KVS_EXCLUDES(mu_);
  bool stopping() const KVS_EXCLUDES(mu_);
  // Waits until then; false: a stop came between.
  bool Pace(Deadline begin) KVS_EXCLUDES(mu_);
  void NoteDropped(uint64_t by_stop) KVS_EXCLUDES(mu_);

  // Refuses offers from now on, and is dry when none waits any more: ask again until `drained`.
  // Never waits. What the tier's checkpoint returned, once; the next call has it tried again.
  Status Drain() KVS_EXCLUDES(mu_);
  // False: it was not draining.
  bool Resume() KVS_EXCLUDES(mu_);
  bool draining() const KVS_EXCLUDES(mu_);
  // Nothing waits, nothing comes, and the tier's next start is quick.
  bool drained() const KVS_EXCLUDES(mu_);
  // A checkpoint is due: it drains, and nothing waits.
  bool dry() const KVS_EXCLUDES(mu_);
  // How that checkpoint ended. Nothing if offers came meanwhile.
  void NoteCheckpoint(const Status& status) KVS_EXCLUDES(mu_);

  WriteQueueCounters counters() const KVS_EXCLUDES(mu_);

 private:
  struct Draining {
    enum : uint8_t { kNo, kDrying, kFailed, kDrained } state = kNo;
    Status failed;  // why kFailed
    bool DryIf(bool none_waits) const { return state == kDrying && none_waits; }
  };

  std::vector<Offered> TakeSome() KVS_REQUIRES(mu_);

  const WriteQueueOptions options_;  // but policy and rates
  WritePolicy policy_;

  mutable Mutex mu_;
  std::condition_variable changed_;
  std::deque<Offered> offers_ KVS_GUARDED_BY(mu_), put_back_ KVS_GUARDED_BY(mu_);
  std::unordered_set<PageKey, PageKeyHash> keys_ KVS_GUARDED_BY(mu_);  // those of all that wait
  uint64_t taken_ KVS_GUARDED_BY(mu_) = 0, taken_bytes_ KVS_GUARDED_BY(mu_) = 0;
  TenantRates tenant_rates_ KVS_GUARDED_BY(mu_);
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  Draining drain_ KVS_GUARDED_BY(mu_);
  WriteQueueCounters counters_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
