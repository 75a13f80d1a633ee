// SPDX-License-Identifier: Apache-2.0
// HoldLimits: how much of a held prefix an open takes, and how far the series of held pages go.
// An engine that has one length for a whole batch says how much it can use; one that can compute a
// series of positions that it computes itself only asks for no page that was stored without it.
//
// Values and pure functions. Threads: any; of pages, whoever holds the store's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "server/store/options/store_fwd.h"

namespace kvstrata {

struct HoldLimits {
  uint32_t max_tokens = 0;  // rounded down to whole pages; 0: no limit
  // No more than the series that the plan needs were stored with, unless the codec has made its
  // artefact of the whole prompt: then nothing is needed of them.
  bool only_reported = false;
  bool only_held = false;  // nothing is computed: no pages behind those that are held

  // How many of `pages` pages max_tokens allows.
  size_t Pages(size_t pages, uint32_t page_tokens) const;
};

// Leading pages of a prefix that have the series which `needs` (kernels/plan/plan_needs.h) names:
// surprisal of all tokens but the prefix's first, sentence ends of all. Null pages have none.
size_t ReportedPages(std::span<Page* const> prefix, uint32_t needs, uint32_t page_tokens);

}  // namespace kvstrata
