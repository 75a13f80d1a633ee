// SPDX-License-Identifier: Apache-2.0
// PrefixCatalog: what is held of prompts: pages and index blocks under their keys in memory, whole
// prompts' artefacts, and what of both the tier below has.
//
// Ownership: PrefixIndex holds no references; the tier is borrowed. Thread-safety: methods that say
// so are called under the store's lock, all others from any thread without it. Cost: a hash look-up
// or two a page; FindAnywhere takes the lock for 256 pages at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/pages/artefacts.h"
#include "server/store/pages/page_tier.h"
#include "server/store/prompts/artefact_ledger.h"
#include "server/store/prompts/held_prefix.h"
#include "server/store/prompts/prefix_survey.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

// What memory has of a prompt.
struct Hit {
  std::vector<Page*> pages, index_blocks;  // null: a page that an artefact makes redundant
  bool whole = true;                       // no page is null
};

class PrefixCatalog {
 public:
  PrefixCatalog(Books& books, SessionCatalog& catalog, PageReferences& references)
      : books_(books), catalog_(catalog), references_(references) {}

  // Null: there is none. It outlives all its loads and is unset before it ends. `remote`: behind
  // it is a remote tier, of which it is worth asking for so many missing tokens.
  void SetPageTier(PageTier* tier, std::optional<uint32_t> remote = std::nullopt)
      KVS_EXCLUDES(store_lock);
  PageTier* tier() const KVS_REQUIRES(store_lock) { return tier_; }
  std::optional<uint32_t> remote_min_tokens() const KVS_REQUIRES(store_lock) { return remote_; }
  // What artefacts the tier has. Has a lock of its own.
  ArtefactLedger& ledger() { return ledger_; }

  // In memory. `artefact`: the prompt's, if it may stand for raw pages. `device`: who asks; none:
  // pages of any device count. `found` is called for each page at once.
  Hit FindPrefix(const PrefixQuestion& q, const std::optional<RawFree>& artefact,
                 std::optional<uint32_t> device,
                 const std::function<void(Page*)>& found = nullptr) const KVS_REQUIRES(store_lock);
  // In memory of any device and in the tier together, and with what an open found in a remote one.
  // Takes nothing.
  HeldPrefix FindAnywhere(const PrefixQuestion& q, const std::optional<RawFree>& artefact,
                          const TierFinds* remote = nullptr) KVS_EXCLUDES(store_lock);
  // One in memory that a session of `device` may map; null if there is none. Its age stays.
  const Artefact* FindArtefact(const PageKey& key, uint32_t device) const KVS_REQUIRES(store_lock);
  // What an artefact in memory, that a session of `device` may map, makes redundant of raw pages.
  std::optional<RawFree> RawFreeBy(const Plan& plan, const PageKey& artefact, uint32_t device) const
      KVS_REQUIRES(store_lock) {
    return RawFreeBy(plan, FindArtefact(artefact, device));
  }
  // The same of one that need not be entered; null: there is none.
  std::optional<RawFree> RawFreeBy(const Plan& plan, const Artefact* artefact) const
      KVS_REQUIRES(store_lock);
  // The same of the artefact of a prompt of `tokens`, in memory or in the tier.
  std::optional<RawFree> RawFreeAnywhere(const Plan& plan, const PageKey& artefact, uint32_t device,
                                         size_t tokens) KVS_EXCLUDES(store_lock);
  // Whether a sequence of that plan may open on an artefact alone.
  bool OpensWithoutRaw(const Plan& plan) const;

  // Enters a sealed page or index block under its key; if somebody was faster, theirs is found and
  // ours stays private, unless theirs lies on another device: then it is a replica. It is page
  // number `n` of the sequence, or the index block that ends with that. Of a private sequence
  // nothing is entered. What is there, now or before, is offered to the tier below, but for raw
  // pages that the sequence is about to release.
  void EnterPrefix(const Sequence& s, Page* page, size_t n, OfferedFor why = OfferedFor::kSealed)
      KVS_REQUIRES(store_lock);
  // Pages that it has all the same: behind its artefact, or when it closes. Behind its artefact a
  // remote tier is offered its index, too, without which the artefact serves nobody.
  void OfferKept(const Sequence& s, OfferedFor why) KVS_REQUIRES(store_lock);

 private:
  // Looks for one tenant's pages: a piece of a survey.
  void FindInMemory(const std::string& tenant, std::span<const PageKey> keys,
                    std::span<HeldIn> places) const KVS_EXCLUDES(store_lock);

  Books& books_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  ArtefactLedger ledger_;
  PageTier* tier_ KVS_GUARDED_BY(store_lock) = nullptr;
  std::optional<uint32_t> remote_ KVS_GUARDED_BY(store_lock);
};

}  // namespace kvstrata
