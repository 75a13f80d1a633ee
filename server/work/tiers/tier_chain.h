// SPDX-License-Identifier: Apache-2.0
// TierChain: the tiers below memory, in order, as one PageTier of the store. A tier is a row.
//
// What near rows hold is known in this process; look-ups, which tell engines what is there, hear of
// nothing else. Far rows are searched one after the other, each for what those before it have not.
// A load reads from each row what the first that has it holds, behind a row only as far as nothing
// is missing. Offers go to all rows, and each takes what its policy wants.
//
// Ownership: borrows store and rows, which outlive it; is the store's tier from the first Add on.
// Thread-safety: Add by one thread, before the store is used; all else from any thread. Errors:
// those of pins.
#pragma once

#include <vector>

#include "server/store/store.h"
#include "server/work/tiers/tier_row.h"

namespace kvstrata {

class TierChain final : public PageTier {
 public:
  explicit TierChain(Store* store) : store_(store) {}
  // Stops the rows, the last first.
  ~TierChain() override;

  // Behind those that there are.
  void Add(TierRow* row);
  // A row was configured anew.
  void Refresh();

  void Offer(const TierOffer& offer) override;
  bool Holds(const PageKey& key) const override;
  bool Search(TierSearch search) override;
  bool Load(TierLoad load) override;
  Status Pin(const PrefixPin& pin) override;
  Status Unpin(const PrefixPin& pin, bool forget) override;

 private:
  Store* const store_;
  std::vector<TierRow*> rows_;
};

}  // namespace kvstrata
