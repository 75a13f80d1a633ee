// SPDX-License-Identifier: Apache-2.0
// Op append: writes the keys and values of new tokens into the pages of one sequence and layer.
//
// Work items are independent; one item is one (sequence, layer). Elements are converted from the
// source's dtype to the page's (rounding as dtype.h says; equal types are copied bit for bit, NaN
// and infinities included). Rows of the same page that are not written stay untouched.
// Cost: reads and writes 2 * tokens * kv_heads * dim elements. No allocation.
#ifndef KVSTRATA_KERNELS_OPS_APPEND_APPEND_H_
#define KVSTRATA_KERNELS_OPS_APPEND_APPEND_H_

#include "kernels/executor.h"
#include "kernels/page_view.h"

namespace kvstrata {

// Keys or values as the engine has them: [tokens][kv_heads][dim], dim contiguous.
struct SourceRows {
  const std::byte* data = nullptr;  // token 0, head 0
  int64_t token_stride = 0;         // bytes
  int64_t head_stride = 0;          // bytes
  DType dtype = DType::kBF16;
};

struct AppendWork {
  std::byte* const* pages = nullptr;  // of the sequence; [ceil((position + tokens) / page_tokens)]
  PageLayout layout;
  int32_t layer = 0;
  int32_t position = 0;  // of the first new token
  int32_t tokens = 0;    // new tokens, >= 0
  SourceRows k, v;
};

void AppendRef(const AppendWork* work, int64_t n, Executor& executor);
void AppendSimd(const AppendWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_OPS_APPEND_APPEND_H_
