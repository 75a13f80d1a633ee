// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <type_traits>

#include "kernels/ops/append/append.h"
#include "kernels/ops/append/overflow.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

float Load(const std::byte* p, DType t, int c) {
  return WithElement(t, [&]<typename T>() { return ToFloat(reinterpret_cast<const T*>(p)[c]); });
}

void Store(std::byte* p, DType t, int c, float x) {
  WithElement(t, [&]<typename T>() { reinterpret_cast<T*>(p)[c] = FromFloat<T>(x); });
}

bool IsFinite(const std::byte* p, DType t, int c) {
  return WithElement(t, [&]<typename T>() {
    using Bits = std::remove_const_t<decltype(kNotFinite<T>)>;
    return (reinterpret_cast<const Bits*>(p)[c] & kNotFinite<T>) != kNotFinite<T>;
  });
}

// Whether the row is finite as it was written.
bool CopyRow(const std::byte* from, DType from_type, std::byte* to, DType to_type, int dim) {
  if (from_type == to_type) {
    std::memcpy(to, from, dim * SizeOf(to_type));
  } else {
    for (int c = 0; c < dim; ++c) Store(to, to_type, c, Load(from, from_type, c));
  }
  bool finite = true;
  for (int c = 0; c < dim; ++c) finite &= IsFinite(to, to_type, c);
  return finite;
}

bool AppendOne(const AppendWork& w) {
  const PageLayout& p = w.layout;
  bool finite = true;
  for (int32_t i = 0; i < w.tokens; ++i) {
    const int32_t t = w.position + i;
    std::byte* page = w.pages[t / p.page_tokens];
    for (int h = 0; h < p.kv_heads; ++h) {
      std::byte* key = page + p.KeyOffset(w.layer, h, t % p.page_tokens);
      finite &= CopyRow(w.k.data + i * w.k.token_stride + h * w.k.head_stride, w.k.dtype, key,
                        p.dtype, p.head_dim);
      finite &= CopyRow(w.v.data + i * w.v.token_stride + h * w.v.head_stride, w.v.dtype,
                        key + p.value_offset, p.dtype, p.head_dim);
    }
  }
  return finite;
}

}  // namespace

std::optional<AppendedElement> FirstNotFinite(const AppendWork& w) {
  for (const SourceRows* const side : {&w.k, &w.v}) {
    for (int32_t t = 0; t < w.tokens; ++t) {
      for (int32_t h = 0; h < w.layout.kv_heads; ++h) {
        const std::byte* const row = side->data + t * side->token_stride + h * side->head_stride;
        for (int32_t c = 0; c < w.layout.head_dim; ++c) {
          const float x = Load(row, side->dtype, c);
          if (Overflows(x, w.layout.dtype)) return AppendedElement{side == &w.v, t, h, c, x};
        }
      }
    }
  }
  return std::nullopt;
}

bool AppendRef(const AppendWork* work, int64_t n, Executor& executor) {
  std::atomic<bool> finite{true};
  executor.ParallelFor(n, [&](int64_t i) {
    if (!AppendOne(work[i])) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

}  // namespace kvstrata
