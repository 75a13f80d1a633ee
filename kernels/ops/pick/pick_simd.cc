#include "kernels/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/pick/pick_simd.cc"
#include <algorithm>
#include <bit>
#include <limits>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/ops/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {

// Floats in their order as whole numbers, -0 just below 0, and back.
HWY_INLINE uint32_t OrderOf(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
HWY_INLINE float FloatAt(uint32_t order) {
  return std::bit_cast<float>((order >> 31) != 0 ? order & 0x7FFFFFFFu : ~order);
}

// How many scores are above x, or at it if kEqual; a NaN never is.
template <bool kEqual>
HWY_INLINE int32_t Count(const float* scores, int32_t n, float x) {
  const DF d;
  const VF least = hn::Set(d, x);
  const int32_t whole = n - n % static_cast<int32_t>(kN);
  size_t count = 0;
  for (int32_t i = 0; i < whole; i += static_cast<int32_t>(kN)) {
    const VF score = hn::LoadU(d, scores + i);
    count += hn::CountTrue(d, kEqual ? hn::Ge(score, least) : hn::Gt(score, least));
  }
  for (int32_t i = whole; i < n; ++i) {
    if (kEqual ? scores[i] >= x : scores[i] > x) ++count;
  }
  return static_cast<int32_t>(count);
}

// The largest x with at least k scores from x on, by bisection over all floats: at most 32 passes,
// fewer once exactly k are left. REQUIRES: at least k scores are not NaN, k >= 1.
HWY_INLINE float Threshold(const float* scores, int32_t n, int32_t k) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  uint32_t low = OrderOf(-kInfinity), high = OrderOf(kInfinity) + 1;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const int32_t count = Count<true>(scores, n, FloatAt(middle));
    (count >= k ? low : high) = middle;
    if (count == k) break;
  }
  return FloatAt(low);
}

// Writes the indices of the scores above x and of the first `ties` that equal it.
HWY_INLINE void WriteFrom(const PickWork& w, float x, int32_t ties) {
  const DF d;
  int32_t* out = w.out;
  const auto write = [&](int32_t i) HWY_ATTR {
    if (w.scores[i] > x || (w.scores[i] == x && ties-- > 0)) *out++ = i;
  };
  int32_t i = 0;
  for (; i + static_cast<int32_t>(kN) <= w.n; i += static_cast<int32_t>(kN)) {
    // Few scores pass: skip vectors that hold none.
    if (hn::AllFalse(d, hn::Ge(hn::LoadU(d, w.scores + i), hn::Set(d, x)))) continue;
    for (int32_t j = 0; j < static_cast<int32_t>(kN); ++j) write(i + j);
  }
  for (; i < w.n; ++i) write(i);
}

// Every score that is a number, and the first `nans` that are not.
HWY_INLINE void WriteNumbers(const PickWork& w, int32_t nans) {
  int32_t* out = w.out;
  for (int32_t i = 0; i < w.n; ++i) {
    const bool number = w.scores[i] == w.scores[i];
    if (number || nans-- > 0) *out++ = i;
  }
}

void TopKItem(const PickWork& w) {
  const int32_t k = std::clamp(w.k, 0, w.n);
  if (k == 0) return;
  const int32_t numbers = Count<true>(w.scores, w.n, -std::numeric_limits<float>::infinity());
  if (k >= numbers) return WriteNumbers(w, k - numbers);
  const float x = Threshold(w.scores, w.n, k);
  WriteFrom(w, x, k - Count<false>(w.scores, w.n, x));
}

}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(TopKItem);

void TopKSimd(const PickWork& work) { KVS_SIMD_CALL(TopKItem)(work); }

}  // namespace kvstrata
#endif  // HWY_ONCE
