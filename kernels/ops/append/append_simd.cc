// SPDX-License-Identifier: Apache-2.0
#include "kernels/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/append/append_simd.cc"
#include <cstring>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/element.h"
#include "kernels/ops/append/append.h"
#include "kernels/ops/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {

// N fp32 values to the page's type, rounded as FromFloat rounds.
template <typename T>
HWY_INLINE void StoreFloats(VF x, T* out) {
  float lanes[kN];
  hn::StoreU(x, DF(), lanes);
  for (size_t i = 0; i < kN; ++i) out[i] = FromFloat<T>(lanes[i]);
}

HWY_INLINE void StoreFloats(VF x, float* out) { hn::StoreU(x, DF(), out); }

HWY_INLINE void StoreFloats(VF x, BF16* out) {
  const DU du;
  const hn::Rebind<uint16_t, DF> d16;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu))));
  const auto nan = hn::RebindMask(du, hn::IsNaN(x));
  const auto high = hn::IfThenElse(nan, hn::Set(du, 0x7FC0u), rounded);
  const auto narrow = hn::DemoteTo(d16, hn::BitCast(DI(), high));
  hn::StoreU(narrow, d16, reinterpret_cast<uint16_t*>(out));
}

// Highway's emulation truncates.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
HWY_INLINE void StoreFloats(VF x, F16* out) {
  const hn::Rebind<hwy::float16_t, DF> d16;
  hn::StoreU(hn::DemoteTo(d16, x), d16, reinterpret_cast<hwy::float16_t*>(out));
}
#endif

template <typename From, typename To>
HWY_INLINE void ConvertRow(const std::byte* from, std::byte* to, int dim) {
  const From* in = reinterpret_cast<const From*>(from);
  To* out = reinterpret_cast<To*>(to);
  for (int c = 0; c < dim; c += static_cast<int>(kN)) StoreFloats(LoadFloats(in + c), out + c);
}

HWY_INLINE void CopyRow(const std::byte* from, DType from_type, std::byte* to, DType to_type,
                        int dim) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<size_t>(dim * SizeOf(to_type)));
    return;
  }
  WithElement(from_type, [&]<typename From>() HWY_ATTR {
    WithElement(to_type, [&]<typename To>() HWY_ATTR { ConvertRow<From, To>(from, to, dim); });
  });
}

void AppendItem(const AppendWork& w) {
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

}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(AppendItem);

void AppendSimd(const AppendWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(AppendItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
