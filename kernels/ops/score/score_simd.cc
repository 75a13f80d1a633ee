// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/score/score_simd.cc"
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/score/score.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/pages/element.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {

inline constexpr int kQueries = 4;                       // at a time
inline constexpr int kSquares = kQueries * kHeadDimMax;  // where those of their elements begin

// Like DotRows, of q_c * min_c where q_c is negative and q_c * max_c where it is not: the larger of
// the two products, since min_c <= max_c.
template <typename T, int R, int H>
HWY_INLINE VF BoundRows(const std::byte* const* rows, int64_t second_offset, const float* q,
                        int q_stride, int dim) {
  VF acc[kN];
#pragma GCC unroll 16
  for (size_t i = 0; i < kN; ++i) acc[i] = hn::Zero(DF());
  for (int c = 0; c < dim; c += 2 * static_cast<int>(kN)) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      VF low_a, low_b, high_a, high_b;
      LoadPair(reinterpret_cast<const T*>(rows[r]) + c, low_a, low_b);
      LoadPair(reinterpret_cast<const T*>(rows[r] + second_offset) + c, high_a, high_b);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const VF qa = hn::LoadU(DF(), q + h * q_stride + c);
        const VF qb = hn::LoadU(DF(), q + h * q_stride + c + kN);
        VF& sum = acc[h * R + r];
        sum = hn::MulAdd(qa, hn::IfNegativeThenElse(qa, low_a, high_a), sum);
        sum = hn::MulAdd(qb, hn::IfNegativeThenElse(qb, low_b, high_b), sum);
      }
    }
  }
  return SumEach(acc);
}

// Like DotRows, and twice the root of the sums of q_c^2 * variance_c beside it.
template <typename T, int R, int H>
HWY_INLINE VF DeviationRows(const std::byte* const* rows, int64_t second_offset, const float* q,
                            int q_stride, int dim) {
  const std::byte* variances[R];
  for (int r = 0; r < R; ++r) variances[r] = rows[r] + second_offset;
  const VF variance = DotRows<T, R, H>(variances, q + kSquares, q_stride, dim);
  return hn::MulAdd(hn::Set(DF(), 2.0f), hn::Sqrt(variance),
                    DotRows<T, R, H>(rows, q, q_stride, dim));
}

// The scores of a unit of R rows each by H queries, as DotRows gives them.
template <ScoreWork::Kind kKind, typename T, int R, int H>
HWY_INLINE VF ScoresOf(const ScoreWork& w, const std::byte* const* rows, const float* q) {
  const int dim = w.rows.dim;
  if constexpr (kKind == ScoreWork::Kind::kMinMax) {
    return BoundRows<T, R, H>(rows, w.second_offset, q, dim, dim);
  } else if constexpr (kKind == ScoreWork::Kind::kDeviation) {
    return DeviationRows<T, R, H>(rows, w.second_offset, q, dim, dim);
  } else {
    return DotRows<T, R, H>(rows, q, dim, dim);
  }
}

template <ScoreWork::Kind kKind, typename T, int R, int H>
HWY_NOINLINE void ScoreUnits(const ScoreWork& w, const float* q, float* best) {
  for (int32_t u = w.units.begin; u < w.units.end; u += R) {
    const int count = std::min(R, w.units.end - u);
    const std::byte* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = w.rows.Row(u + std::min(r, count - 1));
    float lanes[kN];
    hn::StoreU(ScoresOf<kKind, T, R, H>(w, rows, q), DF(), lanes);
    for (int h = 0; h < H; ++h) {
      // std::max keeps the first where the second is a NaN, as ref does.
      for (int r = 0; r < count; ++r) best[r] = std::max(best[r], lanes[h * R + r]);
    }
    best += count;
  }
}

template <ScoreWork::Kind kKind, typename T>
HWY_INLINE void ScoreQueries(const ScoreWork& w, int queries, const float* q, float* best) {
  constexpr int n = static_cast<int>(kN);
  constexpr int one = n > 8 ? 8 : n, two = n / 2, four = n / 4;
  switch (queries) {
    case 1:
      return ScoreUnits<kKind, T, one, 1>(w, q, best);
    case 2:
      return ScoreUnits<kKind, T, two, 2>(w, q, best);
    case 3:
      return ScoreUnits<kKind, T, four, 3>(w, q, best);
    default:
      return ScoreUnits<kKind, T, four, 4>(w, q, best);
  }
}

template <ScoreWork::Kind kKind, typename T>
HWY_INLINE void ScoreRun(const ScoreWork& w, float* best) {
  float q[2 * kSquares];
  const int dim = w.rows.dim;
  std::fill(best, best + (w.units.end - w.units.begin), -std::numeric_limits<float>::infinity());
  for (int first = 0; first < w.queries; first += kQueries) {
    const int queries = std::min(kQueries, w.queries - first);
    for (int h = 0; h < queries; ++h) {
      ToPairOrder<T>(w.q + int64_t{first + h} * dim, q + h * dim, dim);
    }
    for (int c = 0; kKind == ScoreWork::Kind::kDeviation && c < queries * dim; ++c) {
      q[kSquares + c] = q[c] * q[c];
    }
    ScoreQueries<kKind, T>(w, queries, q, best);
  }
}

// In runs of units, so that adding to `out` needs no more than a little room beside it.
template <ScoreWork::Kind kKind, typename T>
HWY_INLINE void ScoreTyped(const ScoreWork& w) {
  constexpr int kUnits = 256;
  float scores[kUnits];
  for (int32_t u = w.units.begin; u < w.units.end; u += kUnits) {
    ScoreWork run = w;
    run.units = {u, std::min(u + kUnits, w.units.end)};
    float* out = w.out + (u - w.units.begin);
    if (!w.accumulate) {
      ScoreRun<kKind, T>(run, out);
      continue;
    }
    ScoreRun<kKind, T>(run, scores);
    for (int i = 0; i < run.units.end - u; ++i) out[i] += scores[i];
  }
}

void ScoreItem(const ScoreWork& w) {
  KVS_CHECK(w.rows.dim % 64 == 0 && w.rows.dim <= kHeadDimMax);
  WithElement(w.rows.dtype, [&]<typename T>() {
    switch (w.kind) {
      case ScoreWork::Kind::kDot:
        return ScoreTyped<ScoreWork::Kind::kDot, T>(w);
      case ScoreWork::Kind::kMinMax:
        return ScoreTyped<ScoreWork::Kind::kMinMax, T>(w);
      case ScoreWork::Kind::kDeviation:
        return ScoreTyped<ScoreWork::Kind::kDeviation, T>(w);
    }
  });
}

}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(ScoreItem);

void ScoreSimd(const ScoreWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(ScoreItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
