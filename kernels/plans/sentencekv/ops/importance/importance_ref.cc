// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/plans/sentencekv/ops/importance/importance.h"

namespace kvstrata::cuda {

void ImportanceRef(const ImportanceBatch& w) {
  for (int64_t h = 0; h < w.kv_heads; ++h) {
    float* const sums = w.sums + h * w.stride;
    for (int32_t t = 0; t < w.tokens; ++t) {
      double sum = w.first ? 0 : sums[t];
      for (int64_t i = 0; i < w.items; ++i) sum += w.votes[(i * w.kv_heads + h) * w.stride + t];
      sums[t] = static_cast<float>(sum);
    }
    if (!w.last) continue;
    for (int32_t t = w.begin; t < w.tokens; ++t) {
      const int32_t first = std::max(0, t - (w.pool - 1) / 2);
      const int32_t last = std::min(w.tokens - 1, t + w.pool / 2);
      w.importance[h * w.stride + t - w.begin] = *std::max_element(sums + first, sums + last + 1);
    }
  }
}

}  // namespace kvstrata::cuda
