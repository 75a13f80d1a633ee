// SPDX-License-Identifier: Apache-2.0
// PageTiers: a local tier and a remote one behind it, as one PageTier of the store.
//
// What the local tier holds is asked of it alone, and known in this process; look-ups, which tell
// engines what is there, hear of nothing else. An open's load reads what the local tier holds from
// it, then what the remote one was found to have, behind it only as far as nothing is missing.
// Offers go to both; pins are the local tier's, and what they keep is offered to the remote one.
//
// Ownership: borrows what it is given, which outlives it; takes the local tier's place as the
// store's and gives it back. Thread-safety: all methods, from any thread. Errors: those of the
// local tier's pins.
#ifndef KVSTRATA_SERVER_WORK_REMOTE_PAGE_TIERS_H_
#define KVSTRATA_SERVER_WORK_REMOTE_PAGE_TIERS_H_

#include <cstdint>

#include "server/store/store.h"
#include "server/work/remote/remote_pages.h"
#include "server/work/tiers/tier_pages.h"

namespace kvstrata {

class PageTiers final : public PageTier {
 public:
  // `local`: null: there is none.
  PageTiers(Store* store, TierPages* local, RemotePages* remote, uint32_t min_tokens);
  // Stops the remote one.
  ~PageTiers() override;

  void SetMinTokens(uint32_t min_tokens);

  void Offer(const TierOffer& offer) override;
  bool Holds(const PageKey& key) const override;
  bool Search(TierSearch search) override { return remote_->Search(std::move(search)); }
  bool Load(TierLoad load) override;
  Status Pin(const PrefixPin& pin) override;
  Status Unpin(const PrefixPin& pin, bool forget) override;

 private:
  Store* const store_;
  TierPages* const local_;
  RemotePages* const remote_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_REMOTE_PAGE_TIERS_H_
