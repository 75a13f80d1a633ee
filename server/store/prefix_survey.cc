#include "server/store/prefix_survey.h"

#include <algorithm>
#include <utility>

namespace kvstrata {
namespace {

constexpr size_t kFirstPiece = 16;
constexpr size_t kLargestPiece = 256;  // keys: some 10 us

}  // namespace

PrefixSurvey::PrefixSurvey(std::span<const PageKey> pages, const PrefixShape& shape,
                           const IndexLayout& index, Memory memory, const PageTier* tier)
    : pages_(pages), shape_(shape), index_(index), memory_(std::move(memory)), tier_(tier) {}

std::optional<Residence> PrefixSurvey::ResidenceOf(Place place) {
  switch (place) {
    case Place::kDevice:
      return Residence::kDevice;
    case Place::kHost:
      return Residence::kHost;
    case Place::kDisk:
      return Residence::kDisk;
    default:
      return std::nullopt;
  }
}

void PrefixSurvey::AskMemory(std::span<const PageKey> keys, size_t i,
                             std::vector<Place>* places) const {
  while (places->size() <= i) {
    const size_t begin = places->size();
    const size_t piece = std::clamp(begin, kFirstPiece, kLargestPiece);
    const size_t end = std::min(keys.size(), begin + piece);
    places->resize(end, Place::kUnasked);
    memory_(keys.subspan(begin, end - begin), std::span(*places).subspan(begin));
  }
}

bool PrefixSurvey::AskTier(const PageKey& key, Place* place) const {
  if (*place == Place::kNotInMemory) {
    *place = tier_ != nullptr && tier_->Holds(key) ? Place::kDisk : Place::kNowhere;
  }
  return *place != Place::kNowhere;
}

bool PrefixSurvey::HasPage(size_t i, bool superfluous) {
  AskMemory(pages_, i, &page_places_);
  Place& place = page_places_[i];
  if (superfluous) return place == Place::kDevice || place == Place::kHost;
  return AskTier(pages_[i], &place);
}

bool PrefixSurvey::HasBlock(size_t i) {
  for (size_t b = block_keys_.size(); b <= i; ++b) {
    block_keys_.push_back(IndexBlockKey(pages_[(b + 1) * shape_.block_pages - 1], index_));
  }
  AskMemory(block_keys_, i, &block_places_);
  return AskTier(block_keys_[i], &block_places_[i]);
}

}  // namespace kvstrata
