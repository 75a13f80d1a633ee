// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/ops/elements.h"
#include "kernels/plans/sentencekv/ops/observe/observe.h"

namespace kvstrata::cuda {

void ObserveRef(const ObserveBatch& w) {
  for (int b = 0; b < w.batch; ++b) {
    for (int32_t t = std::max(0, w.new_tokens - w.capacity); t < w.new_tokens; ++t) {
      const int64_t row = int64_t{b} * w.new_tokens + t;
      const int64_t slot = int64_t{w.layer} * w.capacity + (w.visible[row] - 1) % w.capacity;
      float* const to = w.tables[b].observed + slot * w.query_floats;
      for (int32_t c = 0; c < w.query_floats; ++c) {
        to[c] = ElementAt(w.q, w.q_dtype, row * w.query_floats + c);
      }
    }
  }
}

}  // namespace kvstrata::cuda
