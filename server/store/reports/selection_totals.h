// SPDX-License-Identifier: Apache-2.0
// SelectionTotals: how often steps selected what of a sequence since it opened, in buckets of equal
// tokens. Who samples keeps the totals of one moment and subtracts them from those of another; the
// store keeps nothing for him, however many ask.
//
// They are sums of the words that steps count pages in anyway (session/access_counts.h), so that a
// step costs the same whether somebody looks or not. Buckets are a power of two of pages: when a
// sequence outgrows them, two of the old ones are one of the new ones, and differences stay exact.
// Sums wrap as the words do, at 2^32; a difference that is no more than half of that is right.
//
// Plain values and pure functions.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvstrata {

inline constexpr uint32_t kMostSelectionBuckets = 512;

struct SelectionTotals {
  uint32_t tokens = 0;           // committed
  uint32_t bucket_tokens = 0;    // a power of two of pages
  uint64_t steps = 0;            // that committed tokens
  std::vector<uint32_t> counts;  // by bucket, summed over layers, modulo 2^32
};

struct SelectionSample {
  SelectionTotals totals;
  uint32_t page_tokens = 0, layers = 0;
  // Why nothing is counted: "full": the plan attends everything; "gpu": what a GPU selects stays
  // there; "": it is.
  std::string_view uncounted;
};

// Pages of the narrowest bucket, of which `buckets` are enough for `pages`. REQUIRES: buckets > 0.
uint32_t BucketPages(uint64_t pages, uint32_t buckets);

// What was selected between `before` and `now`, by bucket of `now`: 0 where a client that wrote
// nonsense made it less. REQUIRES: now.bucket_tokens is a multiple of before.bucket_tokens, which
// is not 0 if there are counts.
std::vector<uint32_t> SelectedSince(const SelectionTotals& before, const SelectionTotals& now);

}  // namespace kvstrata
