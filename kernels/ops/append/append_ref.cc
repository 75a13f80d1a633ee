#include <cstring>

#include "base/check.h"
#include "kernels/ops/append/append.h"

namespace kvstrata {
namespace {

float Load(const std::byte* p, DType t, int c) {
  switch (t) {
    case DType::kF32:
      return reinterpret_cast<const float*>(p)[c];
    case DType::kF16:
      return ToFloat(reinterpret_cast<const F16*>(p)[c]);
    case DType::kBF16:
      return ToFloat(reinterpret_cast<const BF16*>(p)[c]);
  }
  return 0;
}

void Store(std::byte* p, DType t, int c, float x) {
  switch (t) {
    case DType::kF32:
      reinterpret_cast<float*>(p)[c] = x;
      return;
    case DType::kF16:
      reinterpret_cast<F16*>(p)[c] = FromFloat<F16>(x);
      return;
    case DType::kBF16:
      reinterpret_cast<BF16*>(p)[c] = FromFloat<BF16>(x);
      return;
  }
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
