// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/append/append_simd.cc"
#include <algorithm>
#include <atomic>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/append/append.h"
#include "kernels/ops/append/overflow.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/pages/element.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

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

// Rows of one type to another, and the greatest magnitude among them, as bits.
template <typename From, typename To>
struct RowCopy {
  using Vec = hn::VFromD<DI>;
  static HWY_INLINE Vec Start() { return hn::Zero(DI()); }
  static HWY_INLINE Vec Copy(const From* in, To* out, int dim, Vec greatest) {
    const auto magnitude = hn::Set(DI(), 0x7FFFFFFF);
    for (int c = 0; c < dim; c += static_cast<int>(kN)) {
      const VF x = LoadFloats(in + c);
      greatest = hn::Max(greatest, hn::And(hn::BitCast(DI(), x), magnitude));
      StoreFloats(x, out + c);
    }
    return greatest;
  }
  static HWY_INLINE bool IsFinite(Vec greatest) {
    return hn::AllTrue(DI(), hn::Lt(greatest, hn::Set(DI(), kOverflows<To>)));
  }
};

// 16 bits to the same: bit for bit.
template <typename T>
requires(sizeof(T) == 2) struct RowCopy<T, T> {
  using D = hn::ScalableTag<int16_t>;
  using Vec = hn::VFromD<D>;
  static HWY_INLINE Vec Start() { return hn::Zero(D()); }
  static HWY_INLINE Vec Copy(const T* in, T* out, int dim, Vec greatest) {
    const auto magnitude = hn::Set(D(), int16_t{0x7FFF});
    for (int c = 0; c < dim; c += static_cast<int>(2 * kN)) {
      const auto x = hn::LoadU(D(), reinterpret_cast<const int16_t*>(in + c));
      greatest = hn::Max(greatest, hn::And(x, magnitude));
      hn::StoreU(x, D(), reinterpret_cast<int16_t*>(out + c));
    }
    return greatest;
  }
  static HWY_INLINE bool IsFinite(Vec greatest) {
    return hn::AllTrue(D(), hn::Lt(greatest, hn::Set(D(), static_cast<int16_t>(kNotFinite<T>))));
  }
};

// One KV head's rows of tokens that one page holds: keys, or values, which lie `offset` behind
// keys. Whether all are finite as they were written.
template <typename From, typename To>
bool AppendRows(const AppendWork& w, const SourceRows& source, int64_t offset, int head,
                Run tokens) {
  using Rows = RowCopy<From, To>;
  const PageLayout& p = w.layout;
  const int32_t first = w.position + tokens.begin;
  std::byte* to =
      w.pages[first / p.page_tokens] + p.KeyOffset(w.layer, head, first % p.page_tokens) + offset;
  const std::byte* from =
      source.data + tokens.begin * source.token_stride + head * source.head_stride;
  auto greatest = Rows::Start();
  for (int32_t i = tokens.begin; i < tokens.end; ++i) {
    greatest = Rows::Copy(reinterpret_cast<const From*>(from), reinterpret_cast<To*>(to),
                          p.head_dim, greatest);
    from += source.token_stride;
    to += p.slot_stride;
  }
  return Rows::IsFinite(greatest);
}

bool AppendSide(const AppendWork& w, const SourceRows& source, int64_t offset, int head,
                Run tokens) {
  return WithElement(source.dtype, [&]<typename From>() {
    return WithElement(w.layout.dtype, [&]<typename To>() {
      return AppendRows<From, To>(w, source, offset, head, tokens);
    });
  });
}

// A head's keys of a page, then its values, as attention reads them: memory that nobody wrote
// before gets its place in the order of first writes.
bool AppendItem(const AppendWork& w) {
  const int32_t page = w.layout.page_tokens;
  bool finite = true;
  for (Run tokens; tokens.begin < w.tokens; tokens.begin = tokens.end) {
    const int32_t slot = (w.position + tokens.begin) % page;
    tokens.end = std::min(tokens.begin + page - slot, w.tokens);
    for (int head = 0; head < w.layout.kv_heads; ++head) {
      if (!AppendSide(w, w.k, 0, head, tokens)) finite = false;
      if (!AppendSide(w, w.v, w.layout.value_offset, head, tokens)) finite = false;
    }
  }
  return finite;
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(AppendItem);

bool AppendSimd(const AppendWork* work, int64_t n, Executor& executor) {
  std::atomic<bool> finite{true};
  executor.ParallelFor(n, [&](int64_t i) {
    if (!KVS_SIMD_CALL(AppendItem)(work[i])) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

}  // namespace kvstrata
#endif  // HWY_ONCE
