// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops/copy_rows/copy_rows.h"
#include "kernels/ops/elements.h"

namespace kvstrata::cuda {

void CopyRowsRef(const CopyRowsBatch& w) {
  for (int64_t r = 0; r < w.rows; ++r) {
    for (int64_t h = 0; h < w.heads; ++h) {
      const auto* from =
          static_cast<const std::byte*>(w.from) + r * w.from_row_stride + h * w.from_head_stride;
      auto* to = static_cast<std::byte*>(w.to) + r * w.to_row_stride + h * w.to_head_stride;
      for (int c = 0; c < w.dim; ++c) {
        SetElement(to, w.to_dtype, c, ElementAt(from, w.from_dtype, c));
      }
    }
  }
}

}  // namespace kvstrata::cuda
