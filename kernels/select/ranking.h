// SPDX-License-Identifier: Apache-2.0
// Best first, for selectors that stop when a budget is full. Private to selectors.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace kvstrata {

// Larger for what comes earlier: by score, -0 equal to 0 and NaN last, then by lower index.
inline uint64_t RankOf(float score, int32_t index) {
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  const uint32_t order = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{std::isnan(score) ? 0 : order} << 32 | ~static_cast<uint32_t>(index);
}

// The one of `count` (not 0) indices into scores that VisitRanked would visit last.
inline int32_t* LastRanked(const float* scores, int32_t* indices, int32_t count) {
  return std::ranges::min_element(indices, indices + count, {},
                                  [scores](int32_t i) { return RankOf(scores[i], i); });
}

// Calls visit(i) for the indices of scores [n] in descending score, ties to the lower index, NaN
// last, until it returns false. Cost: n, and log n for each index visited.
template <typename Visit>
void VisitRanked(const float* scores, int32_t n, const Visit& visit) {
  std::vector<uint64_t> ranks(n);  // a heap
  for (int32_t i = 0; i < n; ++i) ranks[i] = RankOf(scores[i], i);
  std::ranges::make_heap(ranks);
  for (; !ranks.empty(); ranks.pop_back()) {
    std::ranges::pop_heap(ranks);
    if (!visit(static_cast<int32_t>(~static_cast<uint32_t>(ranks.back())))) return;
  }
}

// How much each of what VisitRanked visits takes of its weight until `room` is used up: all of it,
// but for the last one, which takes what is left. weights [n], not negative, become what is taken.
// Cost: proportional to n, however many take something: many light ones are the rule where
// sentences are short.
inline void TakeRanked(const float* scores, int32_t* weights, int32_t n, int32_t room) {
  std::vector<uint64_t> ranks(n);
  for (int32_t i = 0; i < n; ++i) ranks[i] = RankOf(scores[i], i);
  const auto weight_of = [weights](uint64_t rank) -> int32_t& {
    return weights[~static_cast<uint32_t>(rank)];
  };
  // All before `first` are taken whole, none from `last` on takes anything.
  auto first = ranks.begin(), last = ranks.end();
  while (last - first > 1) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater<>());
    int64_t better = 0;
    for (auto rank = first; rank != middle; ++rank) better += weight_of(*rank);
    if (better < room) {
      room -= static_cast<int32_t>(better);
      first = middle;
    } else {
      for (auto rank = middle; rank != last; ++rank) weight_of(*rank) = 0;
      last = middle;
    }
  }
  if (first != last) weight_of(*first) = std::min(weight_of(*first), room);
}

}  // namespace kvstrata
