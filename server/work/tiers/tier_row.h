// SPDX-License-Identifier: Apache-2.0
// TierRow: one tier below memory: what of the store goes there and comes back, over any ValueTier.
//
// Values: docs/disk_format.md. The way out is tier_writer.h, the way in tier_loads.h. A *near* tier
// knows in this process what it holds; it keeps pins and is scrubbed when no open waits
// (tier_scrubs.h). A *far* one is searched first (tier_searches.h), and what was found there and
// does not come, fails its check or is late ends the prefix there. All goes through memory of the
// row's own: a page is held for the length of a copy, and a request that the tier never answers
// keeps no page.
//
// Ownership: borrows store and tiers, which outlive it. Thread-safety: all methods, from any
// thread. Errors: none reach a caller but those of drains, pins and scrubs; they are counted, and
// logged at most once a second each way.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/tier_hooks.h"
#include "server/tier/value_tier.h"
#include "server/work/tiers/tier_loads.h"
#include "server/work/tiers/tier_scrubs.h"
#include "server/work/tiers/tier_searches.h"
#include "server/work/tiers/tier_writer.h"

namespace kvstrata {

struct TierRowOptions {
  TierWriterOptions writer;
  TierLoadsOptions loads;
  std::optional<TierSearchesOptions> searches;  // a far tier's

  // What suits a far tier.
  static TierRowOptions Far();
};

struct TierRowCounters : TierWriterCounters, TierLoadsCounters, TierSearchesCounters {};

class TierRow {
 public:
  // `above`: the near tier that has values before this one; null: there is none.
  TierRow(const TierRowOptions& options, Store* store, ValueTier* tier, TierHooks hooks,
          ValueTier* above = nullptr);
  // Stop.
  ~TierRow();
  // Ends writes, searches, loads and scrubs: what waits is dropped, what is under way is cancelled.
  // Idempotent.
  void Stop();

  // As PageTier's. Load of a far tier: its `finds` name every key.
  bool Holds(const PageKey& key) const;
  bool Search(TierSearch search);
  bool Load(TierLoad load);
  Status Pin(const PrefixPin& pin);
  Status Unpin(const PrefixPin& pin, bool forget);

  bool far() const { return searches_ != nullptr; }
  // How much must be missing before a far tier is searched.
  uint32_t min_tokens() const { return searches_->min_tokens(); }
  // What of the options may change: timeouts, rates, policy; not queues, batches and patience.
  void Configure(const TierRowOptions& options);
  // It is there no more: what puts it again is not told that it is there.
  void NotePurged(const PageKey& key);

  TierWriter& writer() { return writer_; }
  // REQUIRES: it is near.
  TierScrubs& scrubs() { return *scrubs_; }
  TierRowCounters counters() const;
  double bytes_per_second() const { return loads_.bytes_per_second(); }
  // That the tier, or a copy from them, uses now.
  size_t buffers_in_use() const { return buffers_.in_use(); }

 private:
  TierWriterTerms WriterTerms(ValueTier* above);

  ValueTier* const tier_;
  const TierHooks hooks_;
  TierBuffers buffers_;
  const std::unique_ptr<TierSearches> searches_;  // null: it is near
  TierLoads loads_;
  const std::unique_ptr<TierScrubs> scrubs_;  // null: it is far
  TierWriter writer_;
  StatusLog log_;
};

}  // namespace kvstrata
