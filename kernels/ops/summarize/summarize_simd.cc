// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/summarize/summarize_simd.cc"
#include <bit>
#include <cstring>

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/ops/summarize/summarize.h"
#include "kernels/pages/element.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

inline constexpr int kVectors = 4;  // channels at a time: kVectors * N, a divisor of 64

// A float that came from a T, back to that T; exact, unlike FromFloat also for a NaN's bits.
template <typename T>
HWY_INLINE T Back(float x, T*) {
  return FromFloat<T>(x);
}
HWY_INLINE BF16 Back(float x, BF16*) {
  return {static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16)};
}

template <typename T>
HWY_INLINE void MinMaxChannels(const SummarizeWork& w, int c) {
  const DF d;
  VF low[kVectors], high[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    low[j] = high[j] =
        LoadFloats(reinterpret_cast<const T*>(w.keys.Row(w.rows.begin)) + c + j * kN);
  }
  for (int32_t t = w.rows.begin + 1; t < w.rows.end; ++t) {
    const T* row = reinterpret_cast<const T*>(w.keys.Row(t)) + c;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      // Compare and choose: what Min and Max do with a NaN or a -0 depends on the target.
      const VF x = LoadFloats(row + j * kN);
      low[j] = hn::IfThenElse(hn::Lt(x, low[j]), x, low[j]);
      high[j] = hn::IfThenElse(hn::Gt(x, high[j]), x, high[j]);
    }
  }
  float lows[kVectors * kN], highs[kVectors * kN];
  for (int j = 0; j < kVectors; ++j) {
    hn::StoreU(low[j], d, lows + j * kN);
    hn::StoreU(high[j], d, highs + j * kN);
  }
  T* out = reinterpret_cast<T*>(w.out) + c;
  T* out2 = reinterpret_cast<T*>(w.out2) + c;
  for (size_t i = 0; i < kVectors * kN; ++i) {
    out[i] = Back(lows[i], out);
    out2[i] = Back(highs[i], out2);
  }
}

// Sums in order of position, divided by the count.
template <typename T>
HWY_INLINE void MeanChannels(const SummarizeWork& w, int c) {
  const DF d;
  VF sum[kVectors];
  for (int j = 0; j < kVectors; ++j) sum[j] = hn::Zero(d);
  for (int32_t t = w.rows.begin; t < w.rows.end; ++t) {
    const T* row = reinterpret_cast<const T*>(w.keys.Row(t)) + c;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[j] = hn::Add(sum[j], LoadFloats(row + j * kN));
  }
  const VF count = hn::Set(d, static_cast<float>(w.rows.end - w.rows.begin));
  float means[kVectors * kN];
  for (int j = 0; j < kVectors; ++j) hn::StoreU(hn::Div(sum[j], count), d, means + j * kN);
  if (w.out_dtype == DType::kF32) {
    std::memcpy(reinterpret_cast<float*>(w.out) + c, means, sizeof means);
    return;
  }
  BF16* out = reinterpret_cast<BF16*>(w.out) + c;
  for (size_t i = 0; i < kVectors * kN; ++i) out[i] = FromFloat<BF16>(means[i]);
}

// Two passes: the unit's keys are in the cache for the second.
template <typename T>
HWY_INLINE void DeviationChannels(const SummarizeWork& w, int c) {
  const DF d;
  const VF count = hn::Set(d, static_cast<float>(w.rows.end - w.rows.begin));
  const auto row = [&w, c](int32_t t) { return reinterpret_cast<const T*>(w.keys.Row(t)) + c; };
  VF mean[kVectors], squares[kVectors];
  for (int j = 0; j < kVectors; ++j) mean[j] = squares[j] = hn::Zero(d);
  for (int32_t t = w.rows.begin; t < w.rows.end; ++t) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) mean[j] = hn::Add(mean[j], LoadFloats(row(t) + j * kN));
  }
  for (int j = 0; j < kVectors; ++j) mean[j] = hn::Div(mean[j], count);
  for (int32_t t = w.rows.begin; t < w.rows.end; ++t) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const VF x = hn::Sub(LoadFloats(row(t) + j * kN), mean[j]);
      squares[j] = hn::Add(squares[j], hn::Mul(x, x));
    }
  }
  float means[kVectors * kN], variances[kVectors * kN];
  for (int j = 0; j < kVectors; ++j) {
    hn::StoreU(mean[j], d, means + j * kN);
    hn::StoreU(hn::Div(squares[j], count), d, variances + j * kN);
  }
  for (size_t i = 0; i < kVectors * kN; ++i) {
    (reinterpret_cast<T*>(w.out) + c)[i] = FromFloat<T>(means[i]);
    (reinterpret_cast<T*>(w.out2) + c)[i] = VarianceOf<T>(variances[i]);
  }
}

template <typename T>
HWY_INLINE void SummarizeTyped(const SummarizeWork& w) {
  for (int c = 0; c < w.keys.dim; c += kVectors * static_cast<int>(kN)) {
    switch (w.kind) {
      case SummarizeWork::Kind::kMinMax:
        MinMaxChannels<T>(w, c);
        break;
      case SummarizeWork::Kind::kDeviation:
        DeviationChannels<T>(w, c);
        break;
      case SummarizeWork::Kind::kMean:
        MeanChannels<T>(w, c);
        break;
    }
  }
}

void SummarizeItem(const SummarizeWork& w) {
  WithElement(w.keys.dtype, [&]<typename T>() { SummarizeTyped<T>(w); });
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(SummarizeItem);

void SummarizeSimd(const SummarizeWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(SummarizeItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
