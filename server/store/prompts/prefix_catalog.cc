// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompts/prefix_catalog.h"

#include <utility>

#include "kernels/codec/codec.h"
#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"

namespace kvstrata {
namespace {

constexpr size_t kAhead = 16;  // slots on their way from memory: as many as a core has going
constexpr uint32_t kNoTenant = ~uint32_t{0};

class IndexView final : public PrefixView {
 public:
  // `device`: who asks; none: pages of any device count.
  IndexView(const PrefixIndex& prefix, std::optional<uint32_t> device,
            const PrefixQuestion& question, const PrefixShape& shape,
            const std::function<void(Page*)>& found)
      : index_(prefix), device_(device), question_(question), shape_(shape), found_(found) {}

  HeldIn InMemory(Kind kind, size_t i) override {
    if (kind == Kind::kPage) return Note(i, question_.keys[i], &pages);
    const PageKey& last = question_.keys[(i + 1) * shape_.block_pages - 1];
    return Note(i, IndexBlockKey(last, question_.index), &blocks);
  }
  // What of it is wanted was read before.
  bool InTier(Kind, size_t) override { return false; }

  std::vector<Page*> pages, blocks;  // as far as somebody asked; null: it is not there

 private:
  HeldIn Note(size_t i, const PageKey& key, std::vector<Page*>* found) const {
    Page* const page = device_ ? index_.FindFor(*device_, key) : index_.Find(key);
    if (found->size() <= i) found->resize(i + 1);
    (*found)[i] = page;
    if (page == nullptr) return HeldIn::kNothing;
    if (found_) found_(page);
    return InMemoryOf(page->arena->tier);
  }

  const PrefixIndex& index_;
  const std::optional<uint32_t> device_;
  const PrefixQuestion& question_;
  const PrefixShape& shape_;
  const std::function<void(Page*)>& found_;
};

}  // namespace

Hit PrefixCatalog::FindPrefix(const PrefixQuestion& q, const std::optional<RawFree>& artefact,
                              std::optional<uint32_t> device,
                              const std::function<void(Page*)>& found) const {
  const PrefixShape shape(q.keys.size(), q.page_tokens, q.index);
  IndexView view(books_.prefix, device, q, shape, found);
  const HeldPrefix held =
      FindHeld(shape, RedundantPages(q.plan, artefact, q.keys.size(), q.page_tokens), &view);
  view.pages.resize(held.pages.size());
  view.blocks.resize(held.blocks);
  return {std::move(view.pages), std::move(view.blocks), held.whole};
}

HeldPrefix PrefixCatalog::FindAnywhere(const PrefixQuestion& q,
                                       const std::optional<RawFree>& artefact,
                                       const TierFinds* remote) {
  const PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    references_.DropLost();
    tier = tier_;
  }
  const PrefixShape shape(q.keys.size(), q.page_tokens, q.index);
  const auto memory = [this, &q](std::span<const PageKey> keys, std::span<HeldIn> places) {
    FindInMemory(q.tenant, keys, places);
  };
  PrefixSurvey survey(q, shape, memory, tier, remote);
  return FindHeld(shape, RedundantPages(q.plan, artefact, q.keys.size(), q.page_tokens), &survey);
}

const Artefact* PrefixCatalog::FindArtefact(const PageKey& key, uint32_t device) const {
  const Artefact* const found = books_.artefacts.Peek(key);
  return found != nullptr && found->MappableFrom(device) ? found : nullptr;
}

std::optional<RawFree> PrefixCatalog::RawFreeBy(const Plan& plan, const Artefact* artefact) const {
  if (artefact == nullptr || !OpensWithoutRaw(plan)) return std::nullopt;
  const Extent& first = artefact->extents.front();
  const Tier where = first.page->arena->tier;
  return RawFree{artefact->released, artefact->extents.back().tokens.end, where};
}

bool PrefixCatalog::OpensWithoutRaw(const Plan& plan) const {
  if (plan.stored.keep_raw != KeepRaw::kNo) return false;
  const bool on_gpu = books_.memory.handle_type(Tier::kDevice) != HandleType::kMemfd;
  return !on_gpu || CodecOf(plan).serves_prompts_on_gpu;
}

void PrefixCatalog::FindInMemory(const std::string& tenant, std::span<const PageKey> keys,
                                 std::span<HeldIn> places) const {
  StoreLock lock(books_.mu);
  const PageMap& pages = books_.prefix.by_key();
  for (size_t i = 0; i < std::min(keys.size(), kAhead); ++i) pages.Prefetch(keys[i]);
  uint32_t own = kNoTenant;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) pages.Prefetch(keys[i + kAhead]);
    places[i] = HeldIn::kNothing;
    const PageMap::Slot* const slot = pages.Find(keys[i]);
    if (slot == nullptr) continue;
    if (slot->tenant != own && catalog_.tenant(slot->tenant)->name != tenant) continue;
    own = slot->tenant;
    places[i] = InMemoryOf(slot->tier);
  }
}

std::optional<RawFree> PrefixCatalog::RawFreeAnywhere(const Plan& plan, const PageKey& artefact,
                                                      uint32_t device, size_t tokens) {
  if (!OpensWithoutRaw(plan)) return std::nullopt;
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    references_.DropLost();
    // One that the session may not map is not read from the tier either.
    if (books_.artefacts.Contains(artefact)) return RawFreeBy(plan, artefact, device);
    tier = tier_;
  }
  if (tier == nullptr || !tier->Holds(artefact)) return std::nullopt;
  const std::shared_ptr<const ArtefactRecord> record = ledger_.Find(artefact);
  if (record == nullptr || record->prompt_tokens != tokens) return std::nullopt;
  for (size_t i = 0; i < record->extents.size(); ++i) {
    if (!tier->Holds(ExtentKey(artefact, i, record->extents[i]))) return std::nullopt;
  }
  return RawFreeOf(*record);
}

void PrefixCatalog::SetPageTier(PageTier* tier, std::optional<uint32_t> remote) {
  StoreLock lock(books_.mu);
  tier_ = tier;
  remote_ = remote;
}

void PrefixCatalog::EnterPrefix(const Sequence& s, Page* page, size_t n, OfferedFor why) {
  const bool may_enter = !s.chain.is_private() && books_.memory.failure(page->arena->pool).ok();
  if (!page->indexed && !may_enter) return;
  if (!page->indexed && !books_.prefix.Insert(page)) {
    const bool first_here = page->arena->tier == Tier::kDevice &&
                            books_.prefix.FindFor(page->arena->pool.device(), page->key) == nullptr;
    if (first_here) books_.prefix.InsertReplica(page);
    return;
  }
  const bool goes = s.codec && s.plan.stored.keep_raw == KeepRaw::kNo && !page->summary;
  if (tier_ == nullptr || goes || s.model->OfOneSession()) return;
  tier_->Offer({page->key, s.PlaceOf(n), page->bytes, why, catalog_.tenant(s.model->tenant)->name});
}

void PrefixCatalog::OfferKept(const Sequence& s, OfferedFor why) {
  if (tier_ == nullptr || !s.codec || s.plan.stored.keep_raw != KeepRaw::kNo) return;
  if (s.model->OfOneSession()) return;
  const std::string& tenant = catalog_.tenant(s.model->tenant)->name;
  const std::vector<size_t> released = ReleasedPages(s);  // in order
  for (size_t i = 0; i < s.pages.size(); ++i) {
    const Page* page = s.pages[i];
    if (page == nullptr || !page->indexed || (page->stored && !page->series_changed)) continue;
    if (std::ranges::binary_search(released, i)) continue;
    tier_->Offer({page->key, s.PlaceOf(i), page->bytes, why, tenant});
  }
  if (why != OfferedFor::kArtefact || !remote_ || !s.SharesIndex()) return;
  const size_t block_pages = static_cast<size_t>(s.index.block_tokens) / s.page_tokens();
  for (size_t i = 0; i < s.index_blocks.size(); ++i) {
    const Page* const block = s.index_blocks[i];
    if (!block->indexed) continue;
    tier_->Offer({block->key, s.PlaceOf((i + 1) * block_pages - 1), block->bytes, why, tenant});
  }
}

}  // namespace kvstrata
