// SPDX-License-Identifier: Apache-2.0
// The softmax of the ref attention ops: scores of a query to weights, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace kvstrata {

struct SoftmaxSums {
  double m = -std::numeric_limits<double>::infinity();
  double l = 0;
};

// Replaces each score s by exp(s - m). No scores: m = -inf, l = 0.
inline SoftmaxSums WeighScores(std::vector<double>& scores) {
  SoftmaxSums sums;
  for (double s : scores) sums.m = std::max(sums.m, s);
  const double shift = std::isinf(sums.m) && sums.m < 0 ? 0 : sums.m;
  for (double& s : scores) {
    s = std::exp(s - shift);
    sums.l += s;
  }
  return sums;
}

}  // namespace kvstrata
