// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/pick/pick_simd.cc"
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/ops/simd_rows-inl.h"

#ifndef KVSTRATA_KERNELS_OPS_PICK_HELD_
#define KVSTRATA_KERNELS_OPS_PICK_HELD_
namespace kvstrata {
// Scores that are looked at to guess a threshold, and scores from the guess on that are kept.
inline constexpr int32_t kPickSample = 1024, kPickHeld = 8192;
}  // namespace kvstrata
#endif

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

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

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The largest x with at least k scores from x on, or one that as many are from on, by bisection
// over the floats from `least` on: at most 32 passes, fewer once exactly k are left.
// REQUIRES: at least k scores are `least` or more, k >= 1.
HWY_INLINE float Threshold(const float* scores, int32_t n, int32_t k, float least) {
  uint32_t low = OrderOf(least), high = OrderOf(kInfinity) + 1;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const int32_t count = Count<true>(scores, n, FloatAt(middle));
    (count >= k ? low : high) = middle;
    if (count == k) break;
  }
  return FloatAt(low);
}

// The scores from some x on, in order of index.
struct Held {
  float scores[kPickHeld + kN];
  int32_t at[kPickHeld + kN];  // their indices
  int32_t count;
};

// A score that at least k scores reach, and not many more, if they are spread as every few-th of
// them is; -infinity where that would be too many to hold.
HWY_INLINE float Guess(const float* scores, int32_t n, int32_t k) {
  float sample[kPickSample];
  for (int32_t i = 0; i < kPickSample; ++i) sample[i] = scores[int64_t{i} * n / kPickSample];
  const double share = 1.0 * k * kPickSample / n;
  const auto rank = static_cast<int32_t>(share + 3 * std::sqrt(share) + 2);
  const bool few = 1.0 * rank * n / kPickSample < 0.9 * kPickHeld;
  if (!few || Count<true>(sample, kPickSample, -kInfinity) < rank) return -kInfinity;
  return Threshold(sample, kPickSample, rank, -kInfinity);
}

// Lanes that a mask's bits name, then any: by mask, bytes. Vectors of more lanes do without it.
inline constexpr size_t kFewLanes = kN <= 8 ? kN : 1;
inline constexpr auto kLanesOf = [] {
  struct {
    uint8_t lane[1 << kFewLanes][kFewLanes];
  } lanes{};
  for (size_t mask = 0; mask < 1 << kFewLanes; ++mask) {
    size_t n = 0;
    for (size_t i = 0; i < kFewLanes; ++i) {
      if ((mask >> i & 1) != 0) lanes.lane[mask][n++] = static_cast<uint8_t>(i);
    }
  }
  return lanes;
}();

// Writes the lanes of `mask` of a vector and of their indices from `first` on, and as many lanes as
// there are beside them; how many they were.
// Highway's CompressStore copies its table at each call where it needs one.
HWY_INLINE int32_t HoldLanes(VF score, hn::MFromD<DF> mask, int32_t first, float* scores,
                             int32_t* at) {
  const DF d;
  const auto indices = hn::Iota(DI(), first);
  if constexpr (kN > 8) {
    hn::CompressStore(indices, hn::RebindMask(DI(), mask), DI(), at);
    return static_cast<int32_t>(hn::CompressStore(score, mask, d, scores));
  } else {
    uint8_t bits;
    hn::StoreMaskBits(d, mask, &bits);
    const hn::Rebind<uint8_t, DU> d8;
    const auto lanes = hn::PromoteTo(DU(), hn::LoadU(d8, kLanesOf.lane[bits]));
    hn::StoreU(hn::TableLookupLanes(score, hn::IndicesFromVec(d, lanes)), d, scores);
    hn::StoreU(hn::TableLookupLanes(indices, hn::IndicesFromVec(DI(), lanes)), DI(), at);
    return std::popcount(bits);
  }
}

// Holds what is x or more; false if that is too much.
HWY_INLINE bool Hold(const float* scores, int32_t n, float x, Held& held) {
  const DF d;
  const VF least = hn::Set(d, x);
  const int32_t lanes = static_cast<int32_t>(kN), whole = n - n % lanes;
  int32_t count = 0;
  for (int32_t i = 0; i < whole && count <= kPickHeld - lanes; i += lanes) {
    const VF score = hn::LoadU(d, scores + i);
    count += HoldLanes(score, hn::Ge(score, least), i, held.scores + count, held.at + count);
  }
  if (count > kPickHeld - lanes) return false;
  for (int32_t i = whole; i < n; ++i) {
    if (scores[i] >= x) held.scores[count] = scores[i], held.at[count++] = i;
  }
  held.count = count;
  return true;
}

// Writes the indices of the k largest scores that are held, all of them `least` or more.
HWY_INLINE void WriteHeld(const Held& held, int32_t k, float least, int32_t* out) {
  const float x = Threshold(held.scores, held.count, k, least);
  int32_t ties = k - Count<false>(held.scores, held.count, x);
  // Without a branch on what passes: each index is written, and stays if it does.
  for (int32_t i = 0, written = 0; written < k; ++i) {
    const bool tie = held.scores[i] == x;
    out[written] = held.at[i];
    written += static_cast<int32_t>(held.scores[i] > x) | static_cast<int32_t>(tie && ties > 0);
    ties -= static_cast<int32_t>(tie);
  }
}

// Looks at few of many scores twice. False, and nothing is written, where the guess fails.
HWY_INLINE bool WriteGuessed(const PickWork& w, int32_t k) {
  if (w.n < 4 * kPickSample) return false;
  const float least = Guess(w.scores, w.n, k);
  Held held;
  if (least == -kInfinity || !Hold(w.scores, w.n, least, held) || held.count < k) return false;
  WriteHeld(held, k, least, w.out);
  return true;
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
  if (k == 0 || WriteGuessed(w, k)) return;
  const int32_t numbers = Count<true>(w.scores, w.n, -kInfinity);
  if (k >= numbers) return WriteNumbers(w, k - numbers);
  const float x = Threshold(w.scores, w.n, k, -kInfinity);
  WriteFrom(w, x, k - Count<false>(w.scores, w.n, x));
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(TopKItem);

void TopKSimd(const PickWork& work) { KVS_SIMD_CALL(TopKItem)(work); }

}  // namespace kvstrata
#endif  // HWY_ONCE
