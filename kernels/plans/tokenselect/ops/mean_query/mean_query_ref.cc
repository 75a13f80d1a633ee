// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/elements.h"
#include "kernels/plans/tokenselect/ops/mean_query/mean_query.h"

namespace kvstrata::cuda {

void MeanQueryRef(const MeanQueryBatch& w) {
  for (int32_t c = 0; c < w.row_floats; ++c) {
    double sum = 0;
    for (int64_t row = 0; row < w.rows; ++row) {
      sum += ElementAt(w.q, w.q_dtype, row * w.row_floats + c);
    }
    w.mean[c] = static_cast<float>(sum / w.rows);
  }
}

}  // namespace kvstrata::cuda
