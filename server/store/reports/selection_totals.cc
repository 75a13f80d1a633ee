// SPDX-License-Identifier: Apache-2.0
#include "server/store/reports/selection_totals.h"

#include <bit>

namespace kvstrata {

uint32_t BucketPages(uint64_t pages, uint32_t buckets) {
  return static_cast<uint32_t>(std::bit_ceil((pages + buckets - 1) / buckets));
}

std::vector<uint32_t> SelectedSince(const SelectionTotals& before, const SelectionTotals& now) {
  std::vector<uint32_t> selected = now.counts;
  for (size_t i = 0; i < before.counts.size(); ++i) {
    const size_t bucket = i * before.bucket_tokens / now.bucket_tokens;
    if (bucket >= selected.size()) break;  // the sequence was cut meanwhile
    selected[bucket] -= before.counts[i];
  }
  for (uint32_t& count : selected) {
    if (count > UINT32_MAX / 2) count = 0;
  }
  return selected;
}

}  // namespace kvstrata
