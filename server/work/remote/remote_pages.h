// SPDX-License-Identifier: Apache-2.0
// RemotePages: sealed pages, index blocks and artefacts in a tier that is asynchronous and far
// away, over any ValueTier.
//
// A search asks, in one call, what the tier has of a prompt; a load reads it, in rounds
// (tier_loads.h); the way out is remote_writer.h. What a search says is a plan: what does not come,
// fails its check or is late ends the prefix there. Not asked for is
//   - what the tier was found not to have a short while ago,
//   - what an engine is known to compute in less than twice the time that reading takes at the rate
//     of the last loads.
// A search and its loads together end by a deadline that grows with the tokens; the search has half
// of it, so that a shard that does not answer leaves time for what the others have.
//
// Ownership: borrows store and tiers, which outlive it. Thread-safety: all methods, from any
// thread. Errors: none reach a caller; they are counted, and logged at most once a second.
#ifndef KVSTRATA_SERVER_WORK_REMOTE_REMOTE_PAGES_H_
#define KVSTRATA_SERVER_WORK_REMOTE_REMOTE_PAGES_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <vector>

#include "base/sync.h"
#include "server/store/store.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/value_tier.h"
#include "server/work/remote/recent_keys.h"
#include "server/work/remote/remote_writer.h"
#include "server/work/remote/tenant_rates.h"
#include "server/work/remote/token_bucket.h"
#include "server/work/tiers/tier_loads.h"

namespace kvstrata {

struct RemotePagesOptions {
  uint32_t min_tokens = 256;  // that must be missing
  // For an open: the first and, for each 1024 missing tokens, the second, at most the third.
  std::chrono::microseconds deadline{1'000'000}, deadline_per_1024{100'000},
      deadline_most{10'000'000};
  uint64_t read_rate = 0;                         // bytes a second; 0: no limit
  TenantRatesOptions tenant_read_rates;           // the same for each tenant
  std::chrono::microseconds miss_ttl{5'000'000};  // what was missed is not asked for again
  // What it has is not put again: longer than this it may have left by itself.
  std::chrono::microseconds present_ttl{600'000'000};
  TierLoadsOptions loads{4, uint64_t{64} << 20, std::chrono::seconds(1), BytePath::kRemoteToMemory,
                         Timed::kRemoteLoad};
  RemoteWriterOptions writer;
};

// Since start.
struct RemotePagesCounters : TierLoadsCounters, RemoteWriterCounters {
  uint64_t searches = 0, searched = 0, found = 0;  // found: values of those searched
  uint64_t known_misses = 0;   // searches that were not made: it was missed a short while ago
  uint64_t not_worth = 0;      // the same: computing is quicker
  uint64_t refused = 0;        // the same: too many are under way
  uint64_t late_searches = 0;  // ended by their deadline
  uint64_t missed = 0;         // values that were found, and did not come
  uint64_t over_rate = 0;      // opens that were cut by the read rate, or by their tenant's
  TenantRates::Refused over_read_rates;  // opens that their tenant's own rate cut, by tenant
};

class RemotePages {
 public:
  static constexpr size_t kMostSearches = 256;  // under way

  // `local`: null: there is none.
  RemotePages(const RemotePagesOptions& options, Store* store, ValueTier* local, ValueTier* remote);
  // Stop.
  ~RemotePages();
  // Drops what waits to be written, ends searches and loads without reading on. Idempotent.
  void Stop() KVS_EXCLUDES(mu_);

  void Offer(const TierOffer& offer) { writer_.Offer(offer); }
  // As PageTier's.
  bool Search(TierSearch search) KVS_EXCLUDES(mu_);
  // REQUIRES: load.remote names every key.
  bool Load(TierLoad load);

  // It is there no more: what puts it again is not told that it is there.
  void NotePurged(const PageKey& key) { present_.Erase(key); }

  // What of the options may change: all but the queue, batches and patience. What is known of keys
  // is forgotten: what was missed may be asked for at once, and what is there is put again.
  void Configure(const RemotePagesOptions& options) KVS_EXCLUDES(mu_);
  RemotePagesCounters counters() const KVS_EXCLUDES(mu_);
  double bytes_per_second() const { return loads_.bytes_per_second(); }
  // That the tier, or a copy from them, uses now.
  size_t buffers_in_use() const { return buffers_.in_use(); }

 private:
  struct Searching {
    TierSearch search;
    std::vector<TierProbe> probes;
    Deadline probed_by, deadline;
  };

  // Leaves out what is known to be missing; whether enough is left.
  bool CutKnownMisses(TierSearch* search, uint32_t min_tokens) const;
  bool IsWorthIt(const TierSearch& search) const;
  std::chrono::microseconds TimeFor(uint32_t tokens) const KVS_REQUIRES(mu_);
  // The tier has answered; runs in its thread.
  void Found(const std::shared_ptr<Searching>& s) KVS_EXCLUDES(mu_);
  RemoteFinds FindsOf(const Searching& s) KVS_EXCLUDES(mu_);
  // Whether so much may be read for the tenant now.
  bool MayRead(const std::string& tenant, uint64_t bytes) KVS_EXCLUDES(mu_);

  ValueTier* const remote_;
  TierBuffers buffers_;
  RecentKeys present_, absent_;
  std::stop_source end_searches_;

  mutable Mutex mu_;
  std::condition_variable ended_;
  RemotePagesOptions options_ KVS_GUARDED_BY(mu_);
  TokenBucket read_rate_ KVS_GUARDED_BY(mu_);
  TenantRates tenant_read_rates_ KVS_GUARDED_BY(mu_);
  size_t searching_ KVS_GUARDED_BY(mu_) = 0;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  RemotePagesCounters counters_ KVS_GUARDED_BY(mu_);
  TierLoads loads_;
  RemoteWriter writer_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_REMOTE_REMOTE_PAGES_H_
