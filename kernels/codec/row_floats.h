// SPDX-License-Identifier: Apache-2.0
// A row of any dtype as floats. Private to codecs.
#pragma once

#include "kernels/pages/element.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

template <typename T>
void WidenValues(const std::byte* row, int32_t dim, float* out) {
  const T* x = reinterpret_cast<const T*>(row);
  for (int32_t c = 0; c < dim; ++c) out[c] = ToFloat(x[c]);
}

// Row t of `rows`: out [rows.dim].
inline void WidenRow(const PagedRows& rows, int32_t t, float* out) {
  WithElement(rows.dtype, [&]<typename T>() { WidenValues<T>(rows.Row(t), rows.dim, out); });
}

}  // namespace kvstrata
