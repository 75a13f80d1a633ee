// PrefixSurvey: where the pages and index blocks of a prompt lie, in memory or in the tier below,
// for who reads and takes nothing.
//
// Memory is asked by pieces, of 16 keys first and of at most 256, which the store looks up under
// its lock; the tier key by key, without it. What was found once is not asked for again, so that a
// survey may be a little older in front than behind.
//
// Ownership: borrows all that it is given. Thread-safety: none. Cost: a hash look-up or two a key.
#ifndef KVSTRATA_SERVER_STORE_PREFIX_SURVEY_H_
#define KVSTRATA_SERVER_STORE_PREFIX_SURVEY_H_

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kernels/page_view.h"
#include "server/store/blocks.h"
#include "server/store/held_prefix.h"
#include "server/store/page_tier.h"

namespace kvstrata {

class PrefixSurvey final : public PrefixView {
 public:
  enum class Place : uint8_t { kUnasked, kNotInMemory, kNowhere, kDevice, kHost, kDisk };
  // Writes kDevice, kHost or kNotInMemory for each key.
  using Memory = std::function<void(std::span<const PageKey>, std::span<Place>)>;

  // `tier`: null: there is none.
  PrefixSurvey(std::span<const PageKey> pages, const PrefixShape& shape, const IndexLayout& index,
               Memory memory, const PageTier* tier);

  bool HasPage(size_t i, bool superfluous) override;
  bool HasBlock(size_t i) override;

  // Of what was asked for. Nothing: it is not there.
  std::optional<Residence> page(size_t i) const { return ResidenceOf(page_places_[i]); }
  const PageKey& block_key(size_t i) const { return block_keys_[i]; }

 private:
  static std::optional<Residence> ResidenceOf(Place place);
  // Has memory say where keys from the first that was not asked for up to number `i` lie.
  void AskMemory(std::span<const PageKey> keys, size_t i, std::vector<Place>* places) const;
  bool AskTier(const PageKey& key, Place* place) const;

  const std::span<const PageKey> pages_;
  const PrefixShape shape_;
  const IndexLayout& index_;
  const Memory memory_;
  const PageTier* const tier_;
  std::vector<PageKey> block_keys_;
  std::vector<Place> page_places_, block_places_;  // of the first keys
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_PREFIX_SURVEY_H_
