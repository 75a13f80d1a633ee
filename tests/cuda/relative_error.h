// SPDX-License-Identifier: Apache-2.0
// The norm of a difference over the norm of what it should be.
#pragma once

#include <cmath>
#include <limits>
#include <span>

namespace kvstrata::cuda {

// REQUIRES: equal sizes. Infinity where one has a NaN, or an infinity that the other has not.
inline double RelativeError(std::span<const float> got, std::span<const float> want) {
  double off = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i] && std::isinf(want[i])) continue;
    if (!std::isfinite(got[i]) || !std::isfinite(want[i])) {
      return std::numeric_limits<double>::infinity();
    }
    off += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return off == 0 ? 0 : std::sqrt(off / norm);
}

}  // namespace kvstrata::cuda
