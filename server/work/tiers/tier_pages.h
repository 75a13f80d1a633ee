// SPDX-License-Identifier: Apache-2.0
// TierPages: keeps sealed pages, index blocks and artefacts in a tier below memory, and reads them
// back: the PageTier of the store over any ValueTier.
//
// Values: docs/disk_format.md. The way out is tier_writer.h, the way in tier_loads.h; a scrub goes
// on when no open waits (tier_scrubs.h). All go through memory of their own: a page is held for the
// length of a copy, and a request that the tier never answers keeps no page.
//
// Ownership: borrows store and tier, which outlive it; sets and unsets itself as the store's tier.
// Thread-safety: all methods, from any thread. Errors: none reach a caller but those of drains,
// pins and scrubs; they are counted, and logged at most once a second each way.
#ifndef KVSTRATA_SERVER_WORK_TIERS_TIER_PAGES_H_
#define KVSTRATA_SERVER_WORK_TIERS_TIER_PAGES_H_

#include <cstdint>

#include "server/store/store.h"
#include "server/telemetry/status_log.h"
#include "server/tier/tier_buffers.h"
#include "server/tier/tier_hooks.h"
#include "server/tier/value_tier.h"
#include "server/work/tiers/tier_loads.h"
#include "server/work/tiers/tier_scrubs.h"
#include "server/work/tiers/tier_writer.h"

namespace kvstrata {

struct TierPagesOptions {
  TierWriterOptions writer;
  TierLoadsOptions loads;
};

struct TierPagesCounters : TierWriterCounters, TierLoadsCounters {};

class TierPages final : public PageTier {
 public:
  TierPages(const TierPagesOptions& options, Store* store, ValueTier* tier, TierHooks hooks);
  // Stop, at once.
  ~TierPages() override;
  // Stops the writer as it says, and ends loads and scrubs without reading on. Idempotent.
  void Stop(Deadline deadline, uint64_t most_bytes);

  // What was offered when it was sealed is not written again because somebody uses it.
  void Offer(const TierOffer& offer) override {
    if (offer.why != OfferedFor::kReused && offer.why != OfferedFor::kPinned) {
      writer_.Offer(offer.key);
    }
  }
  bool Holds(const PageKey& key) const override;
  bool Search(TierSearch) override { return false; }
  bool Load(TierLoad load) override { return loads_.Add(std::move(load)); }
  Status Pin(const PrefixPin& pin) override;
  Status Unpin(const PrefixPin& pin, bool forget) override;

  TierWriter& writer() { return writer_; }
  TierScrubs& scrubs() { return scrubs_; }
  // disk.load_timeout of what is read from now on.
  void SetLoadTimeout(std::chrono::microseconds timeout) {
    loads_.SetTimeout(timeout);
    scrubs_.SetTimeout(timeout);
  }
  TierPagesCounters counters() const { return {writer_.counters(), loads_.counters()}; }

 private:
  Store* const store_;
  ValueTier* const tier_;
  const TierHooks hooks_;
  TierBuffers buffers_;
  TierLoads loads_;
  TierScrubs scrubs_;
  TierWriter writer_;
  StatusLog log_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_TIERS_TIER_PAGES_H_
