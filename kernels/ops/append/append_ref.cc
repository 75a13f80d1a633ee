// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "base/check.h"
#include "kernels/element.h"
#include "kernels/ops/append/append.h"

namespace kvstrata {
namespace {

float Load(const std::byte* p, DType t, int c) {
  return WithElement(t, [&]<typename T>() { return ToFloat(reinterpret_cast<const T*>(p)[c]); });
}

void Store(std::byte* p, DType t, int c, float x) {
  WithElement(t, [&]<typename T>() { reinterpret_cast<T*>(p)[c] = FromFloat<T>(x); });
}

void CopyRow(const std::byte* from, DType from_type, std::byte* to, DType to_type, int dim) {
  if (from_type == to_type) {
    std::memcpy(to, from, dim * SizeOf(to_type));
    return;
  }
  for (int c = 0; c < dim; ++c) Store(to, to_type, c, Load(from, from_type, c));
}

void AppendOne(const AppendWork& w) {
  const PageLayout& p = w.layout;
  for (int32_t i = 0; i < w.tokens; ++i) {
    const int32_t t = w.position + i;
    std::byte* page = w.pages[t / p.page_tokens];
    for (int h = 0; h < p.kv_heads; ++h) {
      std::byte* key = page + p.KeyOffset(w.layer, h, t % p.page_tokens);
      CopyRow(w.k.data + i * w.k.token_stride + h * w.k.head_stride, w.k.dtype, key, p.dtype,
              p.head_dim);
      CopyRow(w.v.data + i * w.v.token_stride + h * w.v.head_stride, w.v.dtype,
              key + p.value_offset, p.dtype, p.head_dim);
    }
  }
}

}  // namespace

void AppendRef(const AppendWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { AppendOne(work[i]); });
}

}  // namespace kvstrata
