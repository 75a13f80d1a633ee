// Look-ups: where the longest held prefix lies, page by page. Nothing is taken or read.
#include <algorithm>
#include <string>
#include <utility>

#include "server/store/store_impl.h"

namespace kvstrata {
namespace {

constexpr size_t kUnderLock = 256;  // pages: some 10 us
constexpr size_t kAhead = 16;       // slots on their way from memory: as many as a core has going
constexpr uint32_t kNoTenant = ~uint32_t{0};

Status TooLong(uint64_t tokens) {
  return InvalidArgument(
      "SEQUENCE_TOO_LONG",
      std::to_string(tokens) + " tokens; allowed: at most " + std::to_string(kMaxSequenceTokens));
}

// Goes on behind `found` while the tier has the next key.
void FindInTier(const PageTier& tier, std::span<const PageKey> keys,
                std::vector<Residence>* found) {
  while (found->size() < keys.size() && tier.Holds(keys[found->size()])) {
    found->push_back(Residence::kDisk);
  }
}

}  // namespace

std::string_view NameOf(Residence residence) {
  constexpr std::string_view kNames[] = {"device", "host", "disk"};
  return kNames[static_cast<size_t>(residence)];
}

uint32_t PrefixHit::tokens_in(Residence residence) const {
  return static_cast<uint32_t>(std::ranges::count(pages, residence)) * page_tokens;
}

Store::Impl::Owner Store::Impl::OwnerOf(std::string_view tenant, const KeyChain& chain,
                                        const ModelDesc& desc) {
  return {std::string(tenant), chain, static_cast<uint32_t>(desc.geometry.page_tokens),
          static_cast<uint64_t>(desc.geometry.page_bytes()), desc.name};
}

Result<Store::Impl::Owner> Store::Impl::OwnerOf(uint64_t session_id, uint64_t model) {
  MutexLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Session * session, FindSession(session_id));
  KVS_ASSIGN_OR_RETURN(const Session::KnownModel* found, FindModel(*session, model));
  const auto& [known, chain] = *found;
  return OwnerOf(session->tenant->name, chain, known->desc);
}

Result<Store::Impl::Owner> Store::Impl::OwnerOf(std::string_view tenant, uint64_t model) {
  MutexLock lock(mu_);
  const auto it = models_.find(model);
  if (it == models_.end()) {
    return NotFound("MODEL_UNKNOWN", "model " + std::to_string(model) + " is not registered");
  }
  const ModelDesc& desc = it->second->desc;
  return OwnerOf(tenant, KeyChain(tenant, desc), desc);
}

void Store::Impl::FindInMemory(const std::string& tenant, std::span<const PageKey> keys,
                               std::vector<Residence>* found) const {
  for (size_t end = found->size(); found->size() == end && end < keys.size();) {
    end = std::min(keys.size(), end + kUnderLock);
    MutexLock lock(mu_);
    const PageMap& pages = prefix_.by_key();
    for (size_t i = found->size(); i < std::min(end, found->size() + kAhead); ++i) {
      pages.Prefetch(keys[i]);
    }
    uint32_t own = kNoTenant;
    for (size_t i = found->size(); i < end; ++i) {
      if (i + kAhead < keys.size()) pages.Prefetch(keys[i + kAhead]);
      const PageMap::Slot* const slot = pages.Find(keys[i]);
      if (slot == nullptr) break;
      if (slot->tenant != own && tenants_by_id_[slot->tenant]->name != tenant) break;
      own = slot->tenant;
      found->push_back(slot->tier == Tier::kDevice ? Residence::kDevice : Residence::kHost);
    }
  }
}

PrefixHit Store::Impl::LookupOf(const Owner& owner, std::vector<PageKey> keys) {
  PrefixHit hit;
  hit.page_tokens = owner.page_tokens;
  hit.keys = std::move(keys);
  hit.pages.reserve(hit.keys.size());
  PageTier* tier = nullptr;
  {
    MutexLock lock(mu_);
    tier = tier_;
  }
  // By turns: an eviction may have left a hole in memory that the tier fills.
  for (size_t before = 0;; before = hit.pages.size()) {
    FindInMemory(owner.tenant, hit.keys, &hit.pages);
    if (tier != nullptr) FindInTier(*tier, hit.keys, &hit.pages);
    if (tier == nullptr || hit.pages.size() == before) return hit;
  }
}

PrefixHit Store::Impl::LookupOf(const Owner& owner, std::span<const int32_t> tokens) {
  const size_t usable = UsablePages(tokens.size(), owner.page_tokens, nullptr);
  return LookupOf(owner, owner.chain.Pages(PageKey{}, tokens.first(usable * owner.page_tokens)));
}

Result<PrefixHit> Store::Impl::Lookup(uint64_t session, uint64_t model,
                                      std::span<const int32_t> tokens) {
  if (tokens.size() > kMaxSequenceTokens) return TooLong(tokens.size());
  KVS_ASSIGN_OR_RETURN(const Owner owner, OwnerOf(session, model));
  return LookupOf(owner, tokens);
}

Result<PrefixHit> Store::Impl::Lookup(uint64_t session, uint64_t model,
                                      std::span<const PageKey> keys) {
  KVS_ASSIGN_OR_RETURN(const Owner owner, OwnerOf(session, model));
  return LookupOf(owner, std::vector<PageKey>(keys.begin(), keys.end()));
}

Result<PrefixHit> Store::Impl::LookupFor(std::string_view tenant, uint64_t model,
                                         std::span<const int32_t> tokens) {
  if (tokens.size() > kMaxSequenceTokens) return TooLong(tokens.size());
  KVS_ASSIGN_OR_RETURN(const Owner owner, OwnerOf(tenant, model));
  return LookupOf(owner, tokens);
}

Result<PrefixHit> Store::Impl::LookupFor(std::string_view tenant, uint64_t model,
                                         std::span<const PageKey> keys) {
  KVS_ASSIGN_OR_RETURN(const Owner owner, OwnerOf(tenant, model));
  return LookupOf(owner, std::vector<PageKey>(keys.begin(), keys.end()));
}

}  // namespace kvstrata
