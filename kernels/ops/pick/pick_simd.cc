#include "kernels/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/pick/pick_simd.cc"
#include "hwy/foreach_target.h"

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/ops/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {

using VU = hn::VFromD<DU>;

// Keys that order like scores: a larger score has a larger key, equal scores (-0 and 0 too) the
// same, every NaN the least, 0.
HWY_INLINE VU KeysOf(VF x) {
  const DU du;
  const VF canonical = hn::Add(x, hn::Zero(DF()));  // -0 + 0 = 0
  const VU bits = hn::BitCast(du, canonical);
  const VU negative = hn::BitCast(du, hn::ShiftRight<31>(hn::BitCast(DI(), bits)));
  const VU key = hn::Xor(bits, hn::Or(negative, hn::Set(du, 0x80000000u)));
  return hn::IfThenZeroElse(hn::RebindMask(du, hn::IsNaN(x)), key);
}

// The keys of scores [i, i + N), cut at n; returns how many.
HWY_INLINE int LoadKeys(const float* scores, int32_t i, int32_t n, uint32_t* keys) {
  const int count = std::min<int32_t>(static_cast<int32_t>(kN), n - i);
  if (count == static_cast<int>(kN)) {
    hn::StoreU(KeysOf(hn::LoadU(DF(), scores + i)), DU(), keys);
    return count;
  }
  float rest[kN] = {};
  std::memcpy(rest, scores + i, static_cast<size_t>(count) * sizeof(float));
  hn::StoreU(KeysOf(hn::LoadU(DF(), rest)), DU(), keys);
  return count;
}

// Radix selection from the high digit down: `prefix` grows into the k-th largest key.
struct Threshold {
  uint32_t key;
  int32_t ties;  // how many of the scores with this key are among the k
};

HWY_INLINE Threshold FindThreshold(const float* scores, int32_t n, int32_t k) {
  constexpr int kShift[] = {21, 10, 0}, kBits[] = {11, 11, 10};
  uint32_t prefix = 0, known = 0;  // the key's digits so far, and their mask
  int32_t wanted = k;
  uint32_t counts[1 << 11];
  for (int digit = 0; digit < 3; ++digit) {
    const uint32_t mask = (1u << kBits[digit]) - 1;
    std::fill(counts, counts + mask + 1, 0u);
    for (int32_t i = 0; i < n; i += static_cast<int32_t>(kN)) {
      uint32_t keys[kN];
      const int count = LoadKeys(scores, i, n, keys);
      for (int j = 0; j < count; ++j) {
        if ((keys[j] & known) == prefix) ++counts[(keys[j] >> kShift[digit]) & mask];
      }
    }
    uint32_t bin = mask;
    while (static_cast<int32_t>(counts[bin]) < wanted) wanted -= static_cast<int32_t>(counts[bin--]);
    prefix |= bin << kShift[digit];
    known |= mask << kShift[digit];
  }
  return {prefix, wanted};
}

void TopKItem(const PickWork& w) {
  const int32_t k = std::clamp(w.k, 0, w.n);
  if (k == 0) return;
  if (k == w.n) {
    for (int32_t i = 0; i < k; ++i) w.out[i] = i;
    return;
  }
  Threshold least = FindThreshold(w.scores, w.n, k);
  int32_t* out = w.out;
  for (int32_t i = 0; i < w.n; i += static_cast<int32_t>(kN)) {
    uint32_t keys[kN];
    const int count = LoadKeys(w.scores, i, w.n, keys);
    // Few scores pass: skip vectors that hold none.
    const auto fail = hn::Lt(hn::LoadU(DU(), keys), hn::Set(DU(), least.key));
    if (hn::AllTrue(DU(), fail)) continue;
    for (int j = 0; j < count; ++j) {
      if (keys[j] > least.key || (keys[j] == least.key && least.ties-- > 0)) *out++ = i + j;
    }
  }
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
