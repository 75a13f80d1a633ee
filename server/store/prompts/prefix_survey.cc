// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompts/prefix_survey.h"

#include <algorithm>
#include <utility>

namespace kvstrata {
namespace {

constexpr size_t kFirstPiece = 16;
constexpr size_t kLargestPiece = 256;  // keys: some 10 us

}  // namespace

PrefixSurvey::PrefixSurvey(const PrefixQuestion& question, const PrefixShape& shape, Memory memory,
                           const PageTier* tier, const TierFinds* remote)
    : pages_(question.keys),
      shape_(shape),
      index_(question.index),
      memory_(std::move(memory)),
      tier_(tier),
      remote_(remote) {}

void PrefixSurvey::AskMemory(std::span<const PageKey> keys, size_t i,
                             std::vector<HeldIn>* places) const {
  while (places->size() <= i) {
    const size_t begin = places->size();
    const size_t piece = std::clamp(begin, kFirstPiece, kLargestPiece);
    const size_t end = std::min(keys.size(), begin + piece);
    places->resize(end);
    memory_(keys.subspan(begin, end - begin), std::span(*places).subspan(begin));
  }
}

HeldIn PrefixSurvey::InMemory(Kind kind, size_t i) {
  if (kind == Kind::kPage) {
    AskMemory(pages_, i, &page_places_);
    return page_places_[i];
  }
  for (size_t b = block_keys_.size(); b <= i; ++b) {
    block_keys_.push_back(IndexBlockKey(pages_[(b + 1) * shape_.block_pages - 1], index_));
  }
  AskMemory(block_keys_, i, &block_places_);
  return block_places_[i];
}

bool PrefixSurvey::InTier(Kind kind, size_t i) {
  const PageKey& key = kind == Kind::kPage ? pages_[i] : block_keys_[i];
  if (tier_ != nullptr && tier_->Holds(key)) return true;
  return remote_ != nullptr && remote_->values.contains(key);
}

}  // namespace kvstrata
