// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/ops/pick/pick.h"

namespace kvstrata {

std::vector<int32_t> RankedRef(const float* scores, int32_t n) {
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  // A NaN ranks below everything; the sort is stable, so equal scores keep the lower index.
  const auto before = [&](int32_t a, int32_t b) {
    const float x = scores[a], y = scores[b];
    if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
    return x > y;
  };
  std::stable_sort(order.begin(), order.end(), before);
  return order;
}

void TopKRef(const PickWork& work) {
  const int32_t k = std::clamp(work.k, 0, work.n);
  std::vector<int32_t> order = RankedRef(work.scores, work.n);
  std::sort(order.begin(), order.begin() + k);
  std::copy_n(order.begin(), k, work.out);
}

int32_t CeilShare(double share, int32_t n) {
  if (n <= 0) return 0;
  const double units = std::ceil(share * n - 1e-9);
  return static_cast<int32_t>(std::clamp(units, 1.0, static_cast<double>(n)));
}

double Quantile(const std::vector<double>& values, double q) {
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end());
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(std::floor(at));
  const size_t high = std::min(low + 1, sorted.size() - 1);
  const double t = at - static_cast<double>(low), width = sorted[high] - sorted[low];
  // numpy interpolates from the nearer end.
  return t >= 0.5 ? sorted[high] - width * (1 - t) : sorted[low] + width * t;
}

}  // namespace kvstrata
