// SPDX-License-Identifier: Apache-2.0
// PrefixSurvey: where the pages and index blocks of a prompt lie, in memory or in the tier below,
// for who reads and takes nothing; for an open with what a remote tier says that it has.
//
// Memory is asked by pieces, of 16 keys first and of at most 256, which the store looks up under
// its lock; the tier key by key, without it. What memory said once is not asked for again, so that
// a survey may be a little older in front than behind.
//
// Ownership: borrows all that it is given. Thread-safety: none. Cost: a hash look-up or two a key.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/pages/page_view.h"
#include "server/store/pages/page_tier.h"
#include "server/store/prompts/held_prefix.h"

namespace kvstrata {

// Asks what is held: of whose prompt, and for which plan.
struct PrefixQuestion {
  const std::string& tenant;
  const Plan& plan;
  const IndexLayout& index;  // the plan's
  uint32_t page_tokens;
  std::span<const PageKey> keys;  // for the pages that may be held
};

class PrefixSurvey final : public PrefixView {
 public:
  // Writes kDevice, kHost or kNothing for each key.
  using Memory = std::function<void(std::span<const PageKey>, std::span<HeldIn>)>;

  // `tier`, `remote`: null: there is none.
  PrefixSurvey(const PrefixQuestion& question, const PrefixShape& shape, Memory memory,
               const PageTier* tier, const TierFinds* remote);

  HeldIn InMemory(Kind kind, size_t i) override;
  bool InTier(Kind kind, size_t i) override;

 private:
  // Has memory say where keys from the first that was not asked for up to number `i` lie.
  void AskMemory(std::span<const PageKey> keys, size_t i, std::vector<HeldIn>* places) const;

  const std::span<const PageKey> pages_;
  const PrefixShape shape_;
  const IndexLayout& index_;
  const Memory memory_;
  const PageTier* const tier_;
  const TierFinds* const remote_;
  std::vector<PageKey> block_keys_;
  std::vector<HeldIn> page_places_, block_places_;  // in memory, of the first keys
};

}  // namespace kvstrata
