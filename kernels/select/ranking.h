// Best first, for selectors that stop when a budget is full. Private to kernels/select.
#ifndef KVSTRATA_KERNELS_SELECT_RANKING_H_
#define KVSTRATA_KERNELS_SELECT_RANKING_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/backend.h"

namespace kvstrata {

// Calls visit(i) for the indices of scores [n] in descending score, ties to the lower index, NaN
// last, until it returns false. Cost: few passes over the scores, and a sort of what was visited.
template <typename Visit>
void VisitRanked(const Backend& backend, const float* scores, int32_t n, const Visit& visit) {
  constexpr int32_t kFirst = 64, kGrowth = 8;
  const auto rank = [scores](int32_t i) {
    return std::isnan(scores[i]) ? -std::numeric_limits<float>::infinity() : scores[i];
  };
  std::vector<int32_t> best;
  int32_t visited = 0;
  for (int32_t k = std::min(n, kFirst); visited < n;
       k = static_cast<int32_t>(std::min<int64_t>(n, int64_t{k} * kGrowth))) {
    best.resize(k);
    backend.top_k({scores, n, k, best.data()});
    std::ranges::stable_sort(best, std::greater<>(), rank);
    for (; visited < k; ++visited) {  // the first ones are those of the round before
      if (!visit(best[visited])) return;
    }
  }
}

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_SELECT_RANKING_H_
