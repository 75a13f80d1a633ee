// SPDX-License-Identifier: Apache-2.0
// TierSearches: asks a tier that is far away what it has of a prompt, in one call for all of it.
//
// What a search says is a plan, and no promise. Not asked for is
//   - what the tier was found not to have a short while ago,
//   - what an engine is known to compute in less than twice the time that reading takes at the rate
//     of the last loads.
// A search and its loads together end by a deadline that grows with the tokens. The search has half
// the time, so that a shard that does not answer leaves some for what the others have. How many
// bytes may be read a second is limited here, for all and for each tenant.
//
// Ownership: borrows the tier and what is known of it. Thread-safety: all methods, from any thread.
// Errors: none reach a caller; they are counted.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "base/sync.h"
#include "server/store/pages/page_tier.h"
#include "server/tier/value_tier.h"
#include "server/work/rates/tenant_rates.h"
#include "server/work/rates/token_bucket.h"
#include "server/work/tiers/recent_keys.h"

namespace kvstrata {

struct TierSearchesOptions {
  uint32_t min_tokens = 256;  // that must be missing
  // For an open: the first and, for each 1024 missing tokens, the second, at most the third.
  std::chrono::microseconds deadline{1'000'000}, deadline_per_1024{100'000},
      deadline_most{10'000'000};
  uint64_t read_rate = 0;                         // bytes a second; 0: no limit
  TenantRatesOptions tenant_read_rates;           // the same for each tenant
  std::chrono::microseconds miss_ttl{5'000'000};  // what was missed is not asked for again
  // What it has is not put again: longer than this it may have left by itself.
  std::chrono::microseconds present_ttl{600'000'000};
};

// Since start.
struct TierSearchesCounters {
  uint64_t searches = 0, searched = 0, found = 0;  // found: values of those searched
  uint64_t known_misses = 0;      // searches that were not made: it was missed a short while ago
  uint64_t not_worth = 0;         // the same: computing is quicker
  uint64_t refused_searches = 0;  // the same: too many are under way
  uint64_t late_searches = 0;     // ended by their deadline
  uint64_t missed = 0;            // values that were found, and did not come
  uint64_t over_rate = 0;         // opens that were cut by the read rate, or by their tenant's
  TenantRates::Refused over_read_rates;  // opens that their tenant's own rate cut, by tenant
};

class TierSearches {
 public:
  static constexpr size_t kMostSearches = 256;  // under way

  TierSearches(const TierSearchesOptions& options, ValueTier* tier);

  // As PageTier's. `bytes_a_second`: how fast the tier was read lately; 0: not known.
  bool Begin(TierSearch search, double bytes_a_second) KVS_EXCLUDES(mu_);
  // Values of these keys came of a load, or did not.
  void NoteLoaded(std::span<const PageKey> keys, std::span<const LoadedValue> values)
      KVS_EXCLUDES(mu_);
  KnownKeys& known() { return known_; }

  // Ends searches, and refuses others. Idempotent.
  void Cancel() KVS_EXCLUDES(mu_);
  // After Cancel: waits until none is under way.
  void Await() KVS_EXCLUDES(mu_);
  // What is known of keys is forgotten: what was missed may be asked for at once, and what is there
  // is put again.
  void Configure(const TierSearchesOptions& options) KVS_EXCLUDES(mu_);
  uint32_t min_tokens() const KVS_EXCLUDES(mu_);
  TierSearchesCounters counters() const KVS_EXCLUDES(mu_);

 private:
  struct Searching {
    TierSearch search;
    std::vector<TierProbe> probes;
    Deadline probed_by, deadline;
  };

  // Leaves out what is known to be missing; whether enough is left.
  bool CutKnownMisses(TierSearch* search) const KVS_EXCLUDES(mu_);
  std::chrono::microseconds TimeFor(uint32_t tokens) const KVS_REQUIRES(mu_);
  // The tier has answered; runs in its thread.
  void Found(const std::shared_ptr<Searching>& s) KVS_EXCLUDES(mu_);
  TierFinds FindsOf(const Searching& s) KVS_EXCLUDES(mu_);
  // Whether so much may be read for the tenant now.
  bool MayRead(const std::string& tenant, uint64_t bytes) KVS_EXCLUDES(mu_);

  ValueTier* const tier_;
  KnownKeys known_;
  std::stop_source end_searches_;

  mutable Mutex mu_;
  std::condition_variable ended_;
  TierSearchesOptions options_ KVS_GUARDED_BY(mu_);
  TokenBucket read_rate_ KVS_GUARDED_BY(mu_);
  TenantRates tenant_read_rates_ KVS_GUARDED_BY(mu_);
  size_t searching_ KVS_GUARDED_BY(mu_) = 0;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  TierSearchesCounters counters_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
