// SPDX-License-Identifier: Apache-2.0
// RemoteWriter: puts sealed pages, index blocks and artefacts into a remote tier, by policy.
//
// Its thread ("kvs-remote-write") takes keys from a queue that is bounded by the bytes they stand
// for. A value goes when the local tier has it (a thread of that tier's own writes there), or at
// once where there is none; it is copied from memory, else read from the local tier. An artefact's
// record goes last, when all of its extents were taken. What the remote tier is known to have is
// not put again for a while. Nothing is tried twice: what failed is offered again by the next use.
//
// Ownership: borrows what it is given. Thread-safety: all methods, from any thread; one lock of its
// own, held for a look at the queue. Errors: none reach a caller; they are counted, and logged at
// most once a second.
#ifndef KVSTRATA_SERVER_WORK_REMOTE_REMOTE_WRITER_H_
#define KVSTRATA_SERVER_WORK_REMOTE_REMOTE_WRITER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <optional>
#include <stop_token>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/sync.h"
#include "server/store/options/copy_rate.h"
#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"
#include "server/work/remote/recent_keys.h"
#include "server/work/remote/tenant_rates.h"

namespace kvstrata {

// kReused: what another sequence opened on, what is pinned, and artefacts.
enum class RemoteWrite : uint8_t { kReused, kAll, kOff };

struct RemoteWriterOptions {
  RemoteWrite write = RemoteWrite::kReused;
  uint64_t queue_bytes = uint64_t{1} << 30;   // that offers which wait may stand for
  uint64_t batch_bytes = uint64_t{16} << 20;  // bytes of a batch, at most a second's worth
  uint64_t rate = 0;                          // bytes a second; 0: no limit
  TenantRatesOptions tenant_rates;            // for what is offered; beyond, it is left
  std::chrono::seconds local_patience{60};    // for the local tier to have it
};

// Values since start, but for bytes, and for what waits.
struct RemoteWriterCounters {
  uint64_t waiting = 0, waiting_bytes = 0;  // offers that wait or are being written, now
  uint64_t written = 0, written_bytes = 0;
  uint64_t dropped_full = 0;              // the queue had no room
  uint64_t dropped_rate = 0;              // its tenant had offered as much as its rate allows
  uint64_t dropped_local = 0;             // the local tier did not come to have it
  uint64_t dropped_stop = 0;              // the daemon stopped
  uint64_t gone = 0;                      // it left memory and the local tier before
  uint64_t failed = 0;                    // the remote tier did not take it
  TenantRates::Refused over_write_rates;  // dropped_rate by tenant
};

class RemoteWriter {
 public:
  // `local`: null: there is none. `present`, `absent`: what the remote tier is known to have, and
  // not to have.
  RemoteWriter(const RemoteWriterOptions& options, Store* store, ValueTier* local,
               ValueTier* remote, TierBuffers* buffers, RecentKeys* present, RecentKeys* absent);
  // Stop.
  ~RemoteWriter();
  // Drops what waits, and joins. Idempotent.
  void Stop() KVS_EXCLUDES(mu_);

  // What the policy does not want is left. May be called under the store's lock.
  void Offer(const TierOffer& offer) KVS_EXCLUDES(mu_);
  // For what is offered, and written, from now on.
  void Configure(const RemoteWriterOptions& options) KVS_EXCLUDES(mu_);

  RemoteWriterCounters counters() const KVS_EXCLUDES(mu_);

 private:
  struct Waiting {
    TierOffer offer;
    std::chrono::steady_clock::time_point since;
  };
  // Copies on their way.
  struct Batch {
    std::vector<TierPut> puts;
    std::vector<TierForget> changed;  // to be forgotten before
    uint64_t bytes = 0;
    bool whole = true;  // all that was to go into it, and into those before it, was taken
  };

  bool Wants(const TierOffer& offer) const;
  void Write() KVS_EXCLUDES(mu_);
  // Waits for some; nothing: the end.
  std::optional<std::deque<Waiting>> Next() KVS_EXCLUDES(mu_);
  // Whether the local tier has it; else it waits on, or is dropped.
  bool IsLocal(const Waiting& waiting) KVS_EXCLUDES(mu_);
  void WriteOffered(const TierOffer& offer, Batch* batch) KVS_EXCLUDES(mu_);
  // Adds value number `i` of an offered key, from memory.
  void AddFromMemory(const TierOffer& offer, size_t i, const SealedValue& value, Batch* batch)
      KVS_EXCLUDES(mu_);
  void AddFromLocal(const TierOffer& offer, Batch* batch) KVS_EXCLUDES(mu_);
  // A put of a value of these sizes that the batch has room for, without its buffers.
  TierPut NewPut(const TierOffer& offer, const PageKey& key, uint64_t bytes, Batch* batch)
      KVS_EXCLUDES(mu_);
  // Puts the batch, which has no values afterwards.
  void PutAll(Batch* batch) KVS_EXCLUDES(mu_);
  // Waits for the rate; false: it stops.
  bool Pace(uint64_t bytes) KVS_EXCLUDES(mu_);
  void Count(uint64_t RemoteWriterCounters::*what, uint64_t n) KVS_EXCLUDES(mu_);
  // It waits no more.
  void Leave(const TierOffer& offer) KVS_EXCLUDES(mu_);

  const RemoteWriterOptions options_;  // but policy and rates
  std::atomic<RemoteWrite> policy_;
  CopyRate rate_;
  Store* const store_;
  ValueTier* const local_;
  ValueTier* const remote_;
  TierBuffers* const buffers_;
  RecentKeys* const present_;
  RecentKeys* const absent_;
  std::stop_source end_writes_;

  mutable Mutex mu_;
  std::condition_variable changed_;
  std::deque<Waiting> offers_ KVS_GUARDED_BY(mu_);
  std::deque<Waiting> not_local_ KVS_GUARDED_BY(mu_);  // looked at again after a while
  std::unordered_set<PageKey, PageKeyHash> keys_ KVS_GUARDED_BY(mu_);  // keys of all that wait
  TenantRates tenant_rates_ KVS_GUARDED_BY(mu_);
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  RemoteWriterCounters counters_ KVS_GUARDED_BY(mu_);
  StatusLog log_;
  std::thread thread_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_REMOTE_REMOTE_WRITER_H_
