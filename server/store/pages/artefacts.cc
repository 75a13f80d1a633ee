// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/artefacts.h"

#include <openssl/sha.h>

#include <iterator>
#include <string>

namespace kvstrata {
namespace {

// Length-prefixed, so that no two lists of fields have the same bytes.
void Add(std::string* text, const void* data, size_t bytes) {
  const uint64_t length = bytes;
  text->append(reinterpret_cast<const char*>(&length), sizeof(length));
  text->append(static_cast<const char*>(data), bytes);
}

}  // namespace

PageKey Artefacts::KeyOf(const KeyChain& chain, const PageKey& last_page,
                         std::span<const int32_t> tail, std::string_view plan,
                         std::string_view parameters) {
  const PageKey prompt = chain.Next(last_page, tail);
  std::string text = "kvstrata artefact 1";
  Add(&text, prompt.data(), prompt.size());
  Add(&text, plan.data(), plan.size());
  Add(&text, parameters.data(), parameters.size());
  PageKey key;
  static_assert(std::tuple_size_v<PageKey> == SHA256_DIGEST_LENGTH);
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), key.data());
  return key;
}

const Artefact* Artefacts::Peek(const PageKey& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &*found->second;
}

const Artefact* Artefacts::Find(const PageKey& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  by_age_.splice(by_age_.begin(), by_age_, found->second);
  return &by_age_.front();
}

Artefact Artefacts::Take(std::list<Artefact>::iterator at) {
  Artefact taken = std::move(*at);
  by_key_.erase(taken.key);
  by_age_.erase(at);
  return taken;
}

std::optional<Artefact> Artefacts::Insert(Artefact artefact) {
  std::optional<Artefact> left;
  if (const auto found = by_key_.find(artefact.key); found != by_key_.end()) {
    left = Take(found->second);
  } else if (by_age_.size() == kMaxCount) {
    left = Take(std::prev(by_age_.end()));
  }
  const PageKey key = artefact.key;
  by_age_.push_front(std::move(artefact));
  by_key_.emplace(key, by_age_.begin());
  return left;
}

std::optional<Artefact> Artefacts::EvictOldest(const std::function<bool(const Artefact&)>& may) {
  for (auto at = by_age_.end(); at != by_age_.begin();) {
    --at;
    if (may(*at)) return Take(at);
  }
  return std::nullopt;
}

}  // namespace kvstrata
