// SPDX-License-Identifier: Apache-2.0
// Raw rows of a few heads on scattered pages, for tests of the ops that pack them.
#pragma once

#include <vector>

#include "kernels/cuda/batches/head_rows.h"
#include "kernels/pages/page_view.h"
#include "tests/cuda/scattered_pages.h"

namespace kvstrata::cuda {

// One sequence, one layer: keys and values of `heads` heads, `heads * 2` items in all. Channels
// differ in size and depend on each other, as keys do.
class HeadPages {
 public:
  HeadPages(Rng& rng, int heads, int32_t tokens, const HeadRowShape& shape)
      : shape_(shape),
        pages_(1, (tokens + shape.page_tokens - 1) / shape.page_tokens,
               int64_t{2} * heads * HeadBytes(shape), shape.dtype, rng) {
    std::vector<std::byte>& bytes = pages_.host();
    const int64_t size = SizeOf(shape.dtype), row = shape.head_dim * size;
    for (int64_t at = 0; at < static_cast<int64_t>(bytes.size()); at += row) {
      float before = 0;
      for (int c = 0; c < shape.head_dim; ++c) {
        std::byte* x = &bytes[static_cast<size_t>(at + c * size)];
        before = 0.6f * before + LoadFloat(x, shape.dtype) * (c % 7 == 0 ? 3.0f : 0.5f);
        StoreFloat(x, shape.dtype, before);
      }
    }
    pages_.Upload();
  }

  HeadRows Device(int item, Run run) const {
    return {reinterpret_cast<uint64_t>(pages_.addresses()), item * HeadBytes(shape_), run.begin,
            run.end};
  }
  PagedRows Host(int item) const {
    return {pages_.TableOf(0),  item * HeadBytes(shape_), shape_.slot_stride,
            shape_.page_tokens, shape_.head_dim,          shape_.dtype};
  }
  ScatteredPages& pages() { return pages_; }

 private:
  static int64_t HeadBytes(const HeadRowShape& s) { return s.page_tokens * s.slot_stride; }

  HeadRowShape shape_;
  ScatteredPages pages_;
};

inline HeadRowShape ShapeOf(int head_dim, int page_tokens, DType dtype) {
  return {head_dim, page_tokens, head_dim * SizeOf(dtype), dtype};
}

}  // namespace kvstrata::cuda
