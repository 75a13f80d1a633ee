// SPDX-License-Identifier: Apache-2.0
// What a look-up is asked for, and what it answers. Plain values.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"
#include "server/store/pages/prefix_key.h"

namespace kvstrata {

// Whose pages a look-up is about.
struct PageOwner {
  std::string tenant;
  KeyChain chain;
  Geometry geometry;
  uint32_t page_tokens = 0;
  uint64_t page_bytes = 0;
  std::string model_name;
  uint32_t device = 0;  // device of its session; without one the first
};

// The open that a look-up is to answer for.
struct LookupPlan {
  std::string plan;    // as OpenSequence takes it; "": none, raw pages wherever they lie
  std::string device;  // with a plan: of the session that will open; "": see the look-up
};

// The longest lease of a look-up.
inline constexpr std::chrono::milliseconds kLongestLease = std::chrono::seconds(60);

// What a lease is of: the open of a plan on a prompt.
struct LeasedPrompt {
  uint64_t model = 0;
  std::string plan;           // with every option
  PageKey last_page{};        // the last of the whole pages that may be held
  std::vector<int32_t> rest;  // the tokens behind it
  auto operator<=>(const LeasedPrompt&) const = default;
};

// What was found, page by page.
struct PrefixHit {
  uint32_t page_tokens = 0;
  uint32_t indexed_tokens = 0;  // held ones with a complete index of the plan
  std::optional<Plan> plan;     // that it answers for; none: raw pages
  std::vector<PageKey> keys;    // for the whole pages that may be held
  // Where the leading held pages are; one without raw rows is where the prompt's artefact lies.
  std::vector<Tier> pages;
  uint32_t held_tokens() const { return static_cast<uint32_t>(pages.size()) * page_tokens; }
  uint32_t tokens_in(Tier tier) const;
};

using LookupDone = std::function<void(const Result<PrefixHit>&)>;

}  // namespace kvstrata
