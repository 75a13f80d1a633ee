// SPDX-License-Identifier: Apache-2.0
// Op append: writes the keys and values of new tokens into the pages of one sequence and layer.
//
// Work items are independent; one item is one (sequence, layer). Elements are converted from the
// source's dtype to the page's (rounding as dtype.h says; equal types are copied bit for bit, NaN
// and infinities included). Rows of the same page that are not written stay untouched.
//
// Here rows become pages, whoever brings them: a step, or blocks of an engine. So here they are
// looked at, as the page has them: an fp32 that is finite and overflows a 16-bit page is noticed.
// Cost: reads and writes 2 * tokens * kv_heads * dim elements; looking costs no second pass. No
// allocation.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

// Keys or values as the engine has them: [tokens][kv_heads][dim], dim contiguous.
struct SourceRows {
  const std::byte* data = nullptr;  // token 0, head 0
  int64_t token_stride = 0;         // bytes
  int64_t head_stride = 0;          // bytes
  DType dtype = DType::kBF16;
};

struct AppendWork {
  std::byte* const* pages = nullptr;  // the sequence's; [ceil((position + tokens) / page_tokens)]
  PageLayout layout;
  int32_t layer = 0;
  int32_t position = 0;  // position of the first new token
  int32_t tokens = 0;    // new tokens, >= 0
  SourceRows k, v;
};

// Whether all that was written is finite. All of it is written either way.
bool AppendRef(const AppendWork* work, int64_t n, Executor& executor);
bool AppendSimd(const AppendWork* work, int64_t n, Executor& executor);

// An element of an item's keys or values.
struct AppendedElement {
  bool is_value = false;
  int32_t token = 0, head = 0, channel = 0;  // the item's first token is 0
  float source = 0;
};
// The first, keys before values, of which a page of the layout's dtype holds no finite number; for
// messages. Nothing is written, `pages` is not looked at.
std::optional<AppendedElement> FirstNotFinite(const AppendWork& w);

}  // namespace kvstrata
