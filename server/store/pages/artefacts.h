// SPDX-License-Identifier: Apache-2.0
// Artefacts: what codecs made of whole prompts, for the next sequence with the same one
// (ADR 5: what depends on the whole prompt is keyed by prompt, plan, options, parameters).
//
// All or nothing: an artefact is every extent of the prompt, the state of the Recompressor that
// made them, the positions that need no raw rows any more, and what was reported of the prompt. It
// lies here or in the tier below (artefact_ledger.h); what comes from there is entered here first.
// Ownership: PrefixCatalog holds one reference to each extent's page for an artefact here, and
// drops it for one that Insert or EvictOldest hands out. Thread-safety: none; the store's lock.
// Cost: a hash look-up.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/codec/codec.h"
#include "server/store/pages/page.h"

namespace kvstrata {

// An extent of a codec as the store keeps it. Never written once published.
struct Extent {
  Page* page = nullptr;  // one reference
  uint64_t bytes = 0;    // its own; page->bytes is rounded up
  Run tokens;
  uint64_t checksum = 0;  // checksum of its payload, from its header
  // Set where the host cannot read the pool (kernels/codec/extent.h); else null.
  std::shared_ptr<const std::vector<std::byte>> description;
};

// 0 if it is no extent.
inline uint64_t ChecksumInHeader(std::span<const std::byte> extent) {
  ExtentHeader header{};
  if (extent.size() >= sizeof(header)) std::memcpy(&header, extent.data(), sizeof(header));
  return header.checksum;
}

struct Artefact {
  // Whether artefacts alone refer to its extents.
  bool unused() const {
    return std::all_of(extents.begin(), extents.end(),
                       [](const Extent& e) { return e.page->refs == e.page->artefacts; });
  }

  // Whether they lie on the host or on `device`, where a session of that device may map them.
  bool MappableFrom(uint32_t device) const {
    return std::all_of(extents.begin(), extents.end(), [device](const Extent& e) {
      const PoolId pool = e.page->arena->pool;
      return pool == PoolId::Host() || pool == PoolId::Device(device);
    });
  }

  PageKey key{};
  std::vector<Extent> extents;
  std::shared_ptr<const Recompressor> recompressor;
  std::vector<Run> released;
  uint32_t prompt_tokens = 0;
  Series series;  // series of the prompt
};

class Artefacts {
 public:
  static constexpr size_t kMaxCount = 1024;

  // `last_page`: the key of the prompt's last whole page (zeros: none); `tail`: the tokens behind.
  // The same in every daemon: tenant and model are the chain's.
  static PageKey KeyOf(const KeyChain& chain, const PageKey& last_page,
                       std::span<const int32_t> tail, std::string_view plan,
                       std::string_view parameters);

  bool Contains(const PageKey& key) const { return by_key_.contains(key); }
  // Null if there is none; its age stays.
  const Artefact* Peek(const PageKey& key) const;
  // Null if there is none; else it is the newest now.
  const Artefact* Find(const PageKey& key);

  // Enters one. What had to leave for it: the one of that key, or the oldest of too many.
  std::optional<Artefact> Insert(Artefact artefact);
  // Takes out the oldest one for which `may` agrees.
  std::optional<Artefact> EvictOldest(const std::function<bool(const Artefact&)>& may);

  // All artefacts, from the newest to the oldest.
  const std::list<Artefact>& all() const { return by_age_; }

 private:
  Artefact Take(std::list<Artefact>::iterator at);

  std::list<Artefact> by_age_;
  std::unordered_map<PageKey, std::list<Artefact>::iterator, PageKeyHash> by_key_;
};

}  // namespace kvstrata
