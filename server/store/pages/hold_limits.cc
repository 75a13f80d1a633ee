// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/hold_limits.h"

#include <algorithm>
#include <cmath>

#include "kernels/plan/plan_needs.h"
#include "server/store/pages/page.h"

namespace kvstrata {
namespace {

bool HasSurprisals(const Series& series, bool first, uint32_t page_tokens) {
  const std::span<const float> all(series.surprisal);
  if (all.size() != page_tokens) return false;
  return std::ranges::none_of(all.subspan(first ? 1 : 0), [](float x) { return std::isnan(x); });
}

}  // namespace

size_t HoldLimits::Pages(size_t pages, uint32_t page_tokens) const {
  return max_tokens == 0 ? pages : std::min<size_t>(pages, max_tokens / page_tokens);
}

size_t ReportedPages(std::span<Page* const> prefix, uint32_t needs, uint32_t page_tokens) {
  for (size_t i = 0; i < prefix.size(); ++i) {
    const Series* const series = prefix[i] == nullptr ? nullptr : prefix[i]->series.get();
    if ((needs & (kNeedSurprisal | kNeedBoundary)) == 0) break;
    if (series == nullptr) return i;
    if ((needs & kNeedSurprisal) != 0 && !HasSurprisals(*series, i == 0, page_tokens)) return i;
    if ((needs & kNeedBoundary) != 0 && series->boundary.size() != page_tokens) return i;
  }
  return prefix.size();
}

}  // namespace kvstrata
