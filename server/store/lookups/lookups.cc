// SPDX-License-Identifier: Apache-2.0
#include "server/store/lookups/lookups.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/plans.h"
#include "server/store/books/sequence.h"
#include "server/store/lookups/replication.h"
#include "server/store/prompts/held_prefix.h"
#include "server/store/prompts/prefix_catalog.h"

namespace kvstrata {
namespace {

PageOwner NewOwner(std::string_view tenant, const KeyChain& chain, const ModelDesc& desc,
                   uint32_t device) {
  const Geometry& g = desc.geometry;
  return {std::string(tenant),
          chain,
          g,
          static_cast<uint32_t>(g.page_tokens),
          static_cast<uint64_t>(g.page_bytes()),
          desc.name,
          device};
}

Tier TierOf(HeldIn where, const std::optional<RawFree>& artefact) {
  switch (where) {
    case HeldIn::kDevice:
      return Tier::kDevice;
    case HeldIn::kHost:
      return Tier::kHost;
    case HeldIn::kArtefact:
      return artefact->where;
    default:
      return Tier::kDisk;
  }
}

std::vector<Tier> TiersOf(const HeldPrefix& held, const std::optional<RawFree>& artefact) {
  std::vector<Tier> tiers;
  tiers.reserve(held.pages.size());
  for (const HeldIn where : held.pages) tiers.push_back(TierOf(where, artefact));
  return tiers;
}

}  // namespace

uint32_t PrefixHit::tokens_in(Tier tier) const {
  return static_cast<uint32_t>(std::ranges::count(pages, tier)) * page_tokens;
}

Result<PageOwner> Lookups::OwnerOf(uint64_t session_id, uint64_t model) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  KVS_ASSIGN_OR_RETURN(const Session::KnownModel* found, FindModel(*session, model));
  const auto& [known, chain] = *found;
  return NewOwner(session->tenant->name, chain, known->desc, session->device);
}

Result<PageOwner> Lookups::OwnerOf(std::string_view tenant, uint64_t model) {
  StoreLock lock(books_.mu);
  const auto it = books_.models.all().find(model);
  if (it == books_.models.all().end()) {
    return NotFound("MODEL_UNKNOWN", "model " + std::to_string(model) + " is not registered");
  }
  const ModelDesc& desc = it->second->desc;
  const std::string user = cluster_tenants_.UserOf(tenant);
  return NewOwner(user, KeyChain(cluster_tenants_.NameOf(user), desc), desc, 0);
}

PrefixHit Lookups::LookupOf(const PageOwner& owner, std::vector<PageKey> keys) {
  PrefixHit hit;
  hit.page_tokens = owner.page_tokens;
  hit.keys = std::move(keys);
  const Plan raw;
  const IndexLayout none;
  const HeldPrefix held =
      prefixes_.FindAnywhere({owner.tenant, raw, none, owner.page_tokens, hit.keys}, std::nullopt);
  hit.pages = TiersOf(held, std::nullopt);
  return hit;
}

// What PrepareOpen does of a prompt, and what its open does until it is held.
Result<PrefixHit> Lookups::LookupAsOpened(const PageOwner& owner, std::span<const int32_t> tokens,
                                          const LookupPlan& open, Files files) {
  uint32_t device = owner.device;
  if (!open.device.empty()) {
    KVS_ASSIGN_OR_RETURN(device, devices_.FindDevice(open.device));
  }
  KVS_ASSIGN_OR_RETURN(const Plan named, plans_.ResolvePlan(open.plan));
  PrefixHit hit;
  KVS_ASSIGN_OR_RETURN(hit.plan, plans_.PlanFor(named, owner.geometry));
  KVS_ASSIGN_OR_RETURN(const std::optional<CodecState> codec,
                       plans_.NewCodec(*hit.plan, owner.geometry, files));
  PromptKeys keys = KeysOf(owner.chain, owner.page_tokens, *hit.plan,
                           codec ? &codec->parameters_digest : nullptr, tokens);
  hit.page_tokens = owner.page_tokens;
  hit.keys = std::move(keys.pages);
  std::optional<RawFree> artefact;
  if (codec) artefact = prefixes_.RawFreeAnywhere(*hit.plan, keys.artefact, device, tokens.size());
  const IndexLayout index = IndexOf(*hit.plan, owner.geometry);
  const HeldPrefix held = prefixes_.FindAnywhere(
      {owner.tenant, *hit.plan, index, owner.page_tokens, hit.keys}, artefact);
  hit.pages = TiersOf(held, artefact);
  hit.indexed_tokens =
      static_cast<uint32_t>(held.blocks) * static_cast<uint32_t>(index.block_tokens);
  return hit;
}

Result<PrefixHit> Lookups::LookupOf(const PageOwner& owner, std::span<const int32_t> tokens,
                                    const LookupPlan& open, Files files) {
  KVS_RETURN_IF_ERROR(CheckLength("tokens", tokens.size()));
  if (!open.plan.empty()) return LookupAsOpened(owner, tokens, open, files);
  const size_t usable = UsablePages(tokens.size(), owner.page_tokens, nullptr);
  return LookupOf(owner, owner.chain.Pages(PageKey{}, tokens.first(usable * owner.page_tokens)));
}

Result<PrefixHit> Lookups::Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                                  const LookupPlan& open, Files files) {
  KVS_ASSIGN_OR_RETURN(const PageOwner owner, OwnerOf(session, model));
  return LookupOf(owner, tokens, open, files);
}

void Lookups::Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                     const LookupPlan& open, LookupDone done) {
  const std::function<void(std::function<void()>)> post = replication_.SlowOpens();
  const Result<PrefixHit> hit =
      Lookup(session, model, tokens, open, post ? Files::kKnown : Files::kRead);
  if (hit.ok() || hit.status().reason() != kFileUnread) return done(hit);
  post([this, session, model, open, done = std::move(done),
        tokens = std::vector<int32_t>(tokens.begin(), tokens.end())] {
    const auto look = [&]() -> Result<PrefixHit> {
      try {
        return Lookup(session, model, tokens, open, Files::kRead);
      } catch (const std::bad_alloc&) {
        return ResourceExhausted("MEMORY",
                                 "the daemon has no memory to read the plan's parameters");
      }
    };
    done(look());
  });
}

Result<PrefixHit> Lookups::Lookup(uint64_t session, uint64_t model, std::span<const PageKey> keys) {
  KVS_ASSIGN_OR_RETURN(const PageOwner owner, OwnerOf(session, model));
  return LookupOf(owner, std::vector<PageKey>(keys.begin(), keys.end()));
}

Result<PrefixHit> Lookups::LookupFor(std::string_view tenant, uint64_t model,
                                     std::span<const int32_t> tokens, const LookupPlan& open) {
  KVS_ASSIGN_OR_RETURN(const PageOwner owner, OwnerOf(tenant, model));
  return LookupOf(owner, tokens, open, Files::kRead);
}

Result<PrefixHit> Lookups::LookupFor(std::string_view tenant, uint64_t model,
                                     std::span<const PageKey> keys) {
  KVS_ASSIGN_OR_RETURN(const PageOwner owner, OwnerOf(tenant, model));
  return LookupOf(owner, std::vector<PageKey>(keys.begin(), keys.end()));
}

}  // namespace kvstrata
