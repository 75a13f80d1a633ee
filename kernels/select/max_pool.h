// SPDX-License-Identifier: Apache-2.0
// Maximum over a sliding window, for scores of tokens (docs/spec/tokenselect.md 6,
// docs/spec/sentencekv.md 2). Private to selectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvstrata {

// In place: x[t] becomes the maximum of x over [t - (width - 1) / 2, t + width / 2], cut at the
// ends. `scratch` is overwritten. Cost: 3 passes, whatever the width (van Herk, Gil and Werman).
inline void MaxPool(int32_t width, float* x, int32_t n, std::vector<float>* scratch) {
  if (width <= 1 || n == 0) return;
  const int32_t left = (width - 1) / 2, right = width / 2;
  // Maxima from a block's start to t (x after the loop below) and from t to its end.
  scratch->assign(x, x + n);
  std::vector<float>& to_end = *scratch;
  for (int32_t t = n - 2; t >= 0; --t) {
    if ((t + 1) % width != 0) to_end[t] = std::max(to_end[t], to_end[t + 1]);
  }
  std::vector<float> from_start(x, x + n);
  for (int32_t t = 1; t < n; ++t) {
    if (t % width != 0) from_start[t] = std::max(from_start[t], from_start[t - 1]);
  }
  for (int32_t t = 0; t < n; ++t) {
    const int32_t low = std::max(t - left, 0), high = std::min(t + right, n - 1);
    // The window is cut by one block's edge, or lies in one block and then reaches one of its ends
    // (or an end of x).
    x[t] = low / width == high / width ? (low % width == 0 ? from_start[high] : to_end[low])
                                       : std::max(to_end[low], from_start[high]);
  }
}

}  // namespace kvstrata
