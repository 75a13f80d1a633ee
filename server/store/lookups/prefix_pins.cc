// SPDX-License-Identifier: Apache-2.0
#include "server/store/lookups/prefix_pins.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/lookups/lookups.h"
#include "server/store/prompts/artefact_ledger.h"
#include "server/store/prompts/held_prefix.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/requests/prefix_hit.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;

constexpr microseconds kShortest = std::chrono::milliseconds(1);
constexpr microseconds kLongest = std::chrono::hours(24 * 366);

// What a live sequence has itself. Its last page is not full, and others may have been released.
class SequenceView final : public PrefixView {
 public:
  explicit SequenceView(const Sequence& s) : s_(s) {}

  HeldIn InMemory(Kind kind, size_t i) override {
    const std::vector<Page*>& pages = kind == Kind::kPage ? s_.pages : s_.index_blocks;
    const Page* const page = i < pages.size() ? pages[i] : nullptr;
    return page == nullptr || !page->sealed ? HeldIn::kNothing : InMemoryOf(page->arena->tier);
  }
  bool InTier(Kind, size_t) override { return false; }

 private:
  const Sequence& s_;
};

// Its leading full pages; or, if those do not reach to its prompt's end and the artefact stands for
// the rest, what an open of the prompt would be held for.
HeldPrefix FindHeldBy(const Sequence& s, const std::optional<RawFree>& artefact) {
  SequenceView view(s);
  HeldPrefix held = FindHeld(PrefixShape(s.pages.size(), s.page_tokens(), s.index), {}, &view);
  const size_t prompt = UsablePages(s.prompt_tokens, s.page_tokens(), &s.plan);
  if (!artefact || held.pages.size() >= prompt) return held;
  return FindHeld(PrefixShape(prompt, s.page_tokens(), s.index),
                  RedundantPages(s.plan, artefact, prompt, s.page_tokens()), &view);
}

Status CheckTtl(microseconds ttl) {
  if (ttl >= kShortest && ttl <= kLongest) return OkStatus();
  return InvalidArgument(
      "PIN_TTL", "ttl is " + std::to_string(ttl.count()) + " us; allowed: 1 ms to 366 days");
}

}  // namespace

PrefixPins::PrefixPins(Books& books, const StoreOptions& options, SessionCatalog& catalog,
                       PrefixCatalog& prefixes, Lookups& lookups)
    : books_(books),
      options_(options),
      settings_(options),
      catalog_(catalog),
      prefixes_(prefixes),
      lookups_(lookups) {}

uint64_t PrefixPins::PinLimit() const {
  if (settings_.pin_limit_bytes != 0) return settings_.pin_limit_bytes;
  uint64_t bytes = 0;
  for (const PoolId pool : books_.memory.ids()) bytes += books_.memory.capacity(pool);
  return bytes / 2;
}

uint64_t PrefixPins::PinnedBytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, pin] : pins_) bytes += pin.bytes;
  return bytes;
}

void PrefixPins::EnterPin(PrefixPin pin) {
  for (const PageKey& key : pin.pages) books_.prefix.Pin(key);
  for (const PageKey& key : pin.index_blocks) books_.prefix.Pin(key);
  for (const PageKey& key : pin.artefact) books_.prefix.Pin(key);
  const uint64_t id = pin.id;
  pins_.emplace(id, std::move(pin));
}

PrefixPin PrefixPins::TakePin(std::map<uint64_t, PrefixPin>::iterator at) {
  PrefixPin pin = std::move(at->second);
  pins_.erase(at);
  for (const PageKey& key : pin.artefact) books_.prefix.Unpin(key);
  for (const PageKey& key : pin.index_blocks) books_.prefix.Unpin(key);
  // From the last to the first, as ReleaseAll.
  for (auto key = pin.pages.rbegin(); key != pin.pages.rend(); ++key) books_.prefix.Unpin(*key);
  return pin;
}

Result<PinInfo> PrefixPins::AddPin(PrefixPin pin, std::span<const TierOffer> offers,
                                   microseconds ttl) {
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    const uint64_t used = PinnedBytes();
    if (pin.bytes > PinLimit() - std::min(used, PinLimit())) {
      return ResourceExhausted(
          "PIN_LIMIT", std::to_string(pin.bytes) + " bytes to pin, " + std::to_string(used) +
                           " of " + std::to_string(PinLimit()) +
                           " are pinned; unpin some, or raise pin.limit_bytes");
    }
    pin.id = next_pin_++;
    pin.expires = options_.now() + ttl;
    EnterPin(pin);
    tier = prefixes_.tier();
  }
  if (tier != nullptr) {
    if (const Status kept = tier->Pin(pin); !kept.ok()) {
      (void)RemovePin(pin.id);
      return kept;
    }
    for (const TierOffer& offer : offers) tier->Offer(offer);
  }
  return InfoOf(pin);
}

Result<PinInfo> PrefixPins::PinSequence(uint64_t sequence, microseconds ttl) {
  KVS_RETURN_IF_ERROR(CheckTtl(ttl));
  PrefixPin pin;
  std::vector<TierOffer> offers;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(const Sequence* s, catalog_.FindSequence(sequence));
    const Session& session = *catalog_.SessionOf(s->session);
    if (s->chain.is_private()) {
      return FailedPrecondition("PIN_PRIVATE",
                                "sequence " + std::to_string(sequence) +
                                    " is private: nobody would find what is pinned of it; pin a "
                                    "sequence that was opened without private");
    }
    pin.tenant = session.tenant->name;
    pin.model_name = s->model->desc.name;
    pin.page_tokens = s->page_tokens();
    const PageKey prompt = s->codec ? s->codec->prompt_key : PageKey{};
    const HeldPrefix held = FindHeldBy(*s, prefixes_.RawFreeBy(s->plan, prompt, session.device));
    // `n`: the page, or the last one of the block.
    const auto keep = [&](const Page& page, size_t n, std::vector<PageKey>* keys) {
      keys->push_back(page.key);
      pin.bytes += page.bytes;
      offers.push_back({page.key, s->PlaceOf(n), page.bytes, OfferedFor::kPinned});
    };
    for (size_t i = 0; i < held.pages.size(); ++i) {
      if (held.pages[i] != HeldIn::kArtefact) keep(*s->pages[i], i, &pin.pages);
    }
    const size_t block_pages = PrefixShape(s->pages.size(), s->page_tokens(), s->index).block_pages;
    for (size_t i = 0; i < held.blocks; ++i) {
      keep(*s->index_blocks[i], (i + 1) * block_pages - 1, &pin.index_blocks);
    }
    const Artefact* artefact = books_.artefacts.Peek(prompt);
    if (artefact != nullptr) {
      const ArtefactRecord record = RecordOf(*artefact);
      pin.artefact.push_back(artefact->key);
      for (size_t i = 0; i < record.extents.size(); ++i) {
        pin.artefact.push_back(ExtentKey(artefact->key, i, record.extents[i]));
        pin.bytes += artefact->extents[i].page->bytes;
      }
    }
  }
  if (!pin.pages.empty() || !pin.artefact.empty()) return AddPin(std::move(pin), offers, ttl);
  return FailedPrecondition(
      "PIN_NOTHING", "sequence " + std::to_string(sequence) +
                         " has no full page, or released its first one and its prompt is not "
                         "recompressed");
}

Result<PinInfo> PrefixPins::PinPrefix(std::string_view tenant, uint64_t model,
                                      std::span<const int32_t> tokens, microseconds ttl) {
  KVS_RETURN_IF_ERROR(CheckTtl(ttl));
  KVS_ASSIGN_OR_RETURN(const PageOwner owner, lookups_.OwnerOf(tenant, model));
  // All whole pages: a look-up leaves one token to compute, a pin need not.
  PrefixHit hit = lookups_.LookupOf(owner, owner.chain.Pages(PageKey{}, tokens));
  if (hit.pages.empty()) {
    return NotFound("PIN_MISS", "no page of these tokens is held for " + owner.tenant +
                                    "; pin a prefix that is: kvstrata lookup");
  }
  hit.keys.resize(hit.pages.size());
  PrefixPin pin;
  pin.tenant = owner.tenant;
  pin.model_name = owner.model_name;
  pin.page_tokens = owner.page_tokens;
  pin.bytes = hit.keys.size() * owner.page_bytes;
  std::vector<TierOffer> offers;
  for (size_t i = 0; i < hit.keys.size(); ++i) {
    const PageKey& place = hit.keys[GroupBegin(i)];
    offers.push_back({hit.keys[i], place, owner.page_bytes, OfferedFor::kPinned});
  }
  pin.pages = std::move(hit.keys);
  return AddPin(std::move(pin), offers, ttl);
}

Status PrefixPins::RemovePin(uint64_t id) {
  PrefixPin pin;
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    const auto at = pins_.find(id);
    if (at == pins_.end()) {
      return NotFound("PIN_UNKNOWN",
                      "pin " + std::to_string(id) + " does not exist, was removed or is over");
    }
    pin = TakePin(at);
    tier = prefixes_.tier();
  }
  return tier == nullptr ? OkStatus() : tier->Unpin(pin, /*forget=*/true);
}

void PrefixPins::ExpirePins() {
  std::vector<PrefixPin> over;
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    tier = prefixes_.tier();
    for (auto at = pins_.begin(); at != pins_.end();) {
      const auto next = std::next(at);
      if (at->second.expires <= options_.now()) over.push_back(TakePin(at));
      at = next;
    }
  }
  // No I/O here: the next daemon finds its record, and that its time is over.
  for (const PrefixPin& pin : over) {
    if (tier != nullptr) (void)tier->Unpin(pin, /*forget=*/false);
  }
}

void PrefixPins::RestorePins(std::vector<PrefixPin> pins) {
  StoreLock lock(books_.mu);
  for (PrefixPin& pin : pins) {
    next_pin_ = std::max(next_pin_, pin.id + 1);
    EnterPin(std::move(pin));
  }
}

PinInfo PrefixPins::InfoOf(const PrefixPin& pin) {
  PageOwner owner;
  owner.tenant = pin.tenant;
  PinInfo info;
  const PrefixHit hit = lookups_.LookupOf(owner, pin.pages);
  info.device_pages = static_cast<uint32_t>(std::ranges::count(hit.pages, Tier::kDevice));
  info.host_pages = static_cast<uint32_t>(std::ranges::count(hit.pages, Tier::kHost));
  info.disk_pages = static_cast<uint32_t>(std::ranges::count(hit.pages, Tier::kDisk));
  info.ttl_left = std::max(microseconds(0),
                           std::chrono::duration_cast<microseconds>(pin.expires - options_.now()));
  info.pin = pin;
  return info;
}

std::vector<PinInfo> PrefixPins::Pins() {
  std::vector<PrefixPin> pins;
  {
    StoreLock lock(books_.mu);
    for (const auto& [id, pin] : pins_) pins.push_back(pin);
  }
  std::vector<PinInfo> infos;
  for (const PrefixPin& pin : pins) infos.push_back(InfoOf(pin));
  return infos;
}

PinLimits PrefixPins::PinUse() const {
  StoreLock lock(books_.mu);
  return {PinnedBytes(), PinLimit()};
}

}  // namespace kvstrata
