// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/vote/vote_simd.cc"
#include <algorithm>
#include <limits>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/simd_rows-inl.h"
#include "kernels/ops/vote/vote.h"
#include "kernels/pages/element.h"

#ifndef KVSTRATA_KERNELS_OPS_VOTE_TILE_
#define KVSTRATA_KERNELS_OPS_VOTE_TILE_
namespace kvstrata {
// Positions of a tile of votes; its votes stay in the L1 while the heads pass.
inline constexpr int64_t kVoteTile = 1024;
}  // namespace kvstrata
#endif

HWY_BEFORE_NAMESPACE();
namespace kvstrata::HWY_NAMESPACE {
namespace {

inline constexpr int kQueries = 4;       // at a time
inline constexpr int kQueriesHeld = 16;  // in one pass over the rows
inline constexpr int kScoreTile = 64;    // rows that stay in the L1 while the queries pass
inline constexpr int kPrefetchRows = 8;  // ahead

// Scores of H queries against a tile's rows, query h's at out + h * out_query.
template <typename T, int R, int H>
HWY_NOINLINE void ScoreRows(const ScoreTokensWork& w, Run tile, const float* q, bool prefetch,
                            float* out) {
  const int dim = w.rows.dim;
  for (int32_t t = tile.begin; t < tile.end; t += R) {
    const int count = std::min(R, tile.end - t);
    const std::byte* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = w.rows.Row(t + std::min(r, count - 1));
    for (int r = 0; r < R && prefetch && t + kPrefetchRows + r < w.run.end; ++r) {
      const std::byte* ahead = w.rows.Row(t + kPrefetchRows + r);
      for (size_t at = 0; at < dim * sizeof(T); at += 64) __builtin_prefetch(ahead + at);
    }
    float lanes[kN];
    hn::StoreU(DotRows<T, R, H>(rows, q, dim, dim), DF(), lanes);
    for (int h = 0; h < H; ++h) {
      float* to = out + h * w.out_query + (t - w.run.begin);
      for (int r = 0; r < count; ++r) to[r] = w.scale * lanes[h * R + r];
    }
  }
}

template <typename T>
HWY_INLINE void ScoreQueries(const ScoreTokensWork& w, Run tile, int queries, const float* q,
                             bool prefetch, float* out) {
  constexpr int n = static_cast<int>(kN);
  constexpr int one = n > 8 ? 8 : n, two = n / 2, four = n / 4;
  switch (queries) {
    case 1:
      return ScoreRows<T, one, 1>(w, tile, q, prefetch, out);
    case 2:
      return ScoreRows<T, two, 2>(w, tile, q, prefetch, out);
    case 3:
      return ScoreRows<T, four, 3>(w, tile, q, prefetch, out);
    default:
      return ScoreRows<T, four, 4>(w, tile, q, prefetch, out);
  }
}

// REQUIRES: queries <= kQueriesHeld
template <typename T>
HWY_INLINE void ScoreSome(const ScoreTokensWork& w, int first, int queries) {
  float q[kQueriesHeld * kHeadDimMax];
  const int dim = w.rows.dim;
  for (int i = 0; i < queries; ++i) {
    ToPairOrder<T>(w.q + int64_t{first + i} * dim, q + i * dim, dim);
  }
  for (int32_t t = w.run.begin; t < w.run.end; t += kScoreTile) {
    const Run tile{t, std::min(t + kScoreTile, w.run.end)};
    for (int i = 0; i < queries; i += kQueries) {
      ScoreQueries<T>(w, tile, std::min(kQueries, queries - i), q + i * dim, i == 0,
                      w.out + (first + i) * w.out_query);
    }
  }
}

template <typename T>
HWY_INLINE void ScoreTyped(const ScoreTokensWork& w) {
  for (int first = 0; first < w.queries; first += kQueriesHeld) {
    ScoreSome<T>(w, first, std::min(kQueriesHeld, w.queries - first));
  }
}

void ScoreTokensItem(const ScoreTokensWork& w) {
  KVS_CHECK(w.rows.dim % 64 == 0 && w.rows.dim <= kHeadDimMax);
  WithElement(w.rows.dtype, [&]<typename T>() { ScoreTyped<T>(w); });
}

// The N logits at p, or the `count` that there are and -inf, which weighs nothing.
HWY_INLINE VF LoadLogits(const float* p, int64_t count) {
  if (count >= static_cast<int64_t>(kN)) return hn::LoadU(DF(), p);
  float lanes[kN];
  std::fill(std::copy(p, p + count, lanes), lanes + kN, -std::numeric_limits<float>::infinity());
  return hn::LoadU(DF(), lanes);
}

// A head without any score above -inf votes for nothing.
HWY_INLINE VF ShiftOf(float max) {
  return hn::Set(DF(), max == -std::numeric_limits<float>::infinity() ? 0.0f : max);
}

// Leaves exp(logit - max) in place of each logit of a head.
void SumHead(const VoteWork& w, int64_t h) {
  const DF d;
  constexpr auto n = static_cast<int64_t>(kN);
  float* logits = w.logits + h * w.stride;
  VF top[2] = {hn::Set(d, -std::numeric_limits<float>::infinity()), top[0]};
  for (int64_t t = 0; t < w.n; t += 2 * n) {
    top[0] = hn::Max(top[0], LoadLogits(logits + t, w.n - t));
    if (t + n < w.n) top[1] = hn::Max(top[1], LoadLogits(logits + t + n, w.n - t - n));
  }
  const float max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(top[0], top[1])));
  const VF shift = ShiftOf(max);
  VF sum[2] = {hn::Zero(d), hn::Zero(d)};
  int64_t t = 0;
  for (; t + 2 * n <= w.n; t += 2 * n) {
    const VF a = ExpNonPositive(hn::Sub(hn::LoadU(d, logits + t), shift));
    const VF b = ExpNonPositive(hn::Sub(hn::LoadU(d, logits + t + n), shift));
    hn::StoreU(a, d, logits + t);
    hn::StoreU(b, d, logits + t + n);
    sum[0] = hn::Add(sum[0], a);
    sum[1] = hn::Add(sum[1], b);
  }
  for (int i = 0; t < w.n; t += n, ++i) {
    float lanes[kN];
    const VF p = ExpNonPositive(hn::Sub(LoadLogits(logits + t, w.n - t), shift));
    hn::StoreU(p, d, lanes);
    std::copy(lanes, lanes + std::min(n, w.n - t), logits + t);
    sum[i] = hn::Add(sum[i], p);
  }
  w.max[h] = max;
  const float own = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum[0], sum[1])));
  w.sum[h] = static_cast<float>(w.WithAlways(h, hn::GetLane(shift), own));
}

// Adds what the heads [first, first + H) give to the votes of the positions [begin, end).
template <int H>
HWY_INLINE void AddVotes(const VoteWork& w, int32_t first, int64_t begin, int64_t end,
                         float* votes) {
  const DF d;
  constexpr auto n = static_cast<int64_t>(kN);
  const float* p[H];
  VF weight[H];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    const float sum = w.sum[first + h];  // 0: all of the head's exponentials are
    p[h] = w.logits + (first + h) * w.stride + begin;
    weight[h] = hn::Set(d, sum == 0 ? 0 : 1 / sum);
  }
  const int64_t count = end - begin, whole = count - count % n;
  for (int64_t t = 0; t < whole; t += n) {
    VF sum = hn::Load(d, votes + t);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) sum = hn::MulAdd(hn::LoadU(d, p[h] + t), weight[h], sum);
    hn::Store(sum, d, votes + t);
  }
  if (whole == count) return;
  VF sum = hn::Load(d, votes + whole);
  for (int h = 0; h < H; ++h) {
    float lanes[kN] = {};
    std::copy(p[h] + whole, p[h] + count, lanes);
    sum = hn::MulAdd(hn::LoadU(d, lanes), weight[h], sum);
  }
  hn::Store(sum, d, votes + whole);
}

// votes[t..t + kVoteTile) of all heads.
void VoteTile(const VoteWork& w, int64_t tile) {
  const int64_t begin = tile * kVoteTile, end = std::min<int64_t>(begin + kVoteTile, w.n);
  alignas(64) float votes[kVoteTile] = {};
  int32_t h = 0;
  for (; h + 4 <= w.heads; h += 4) AddVotes<4>(w, h, begin, end, votes);
  for (; h < w.heads; ++h) AddVotes<1>(w, h, begin, end, votes);
  std::copy(votes, votes + (end - begin), w.votes + begin);
}

}  // namespace
}  // namespace kvstrata::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(ScoreTokensItem);
KVS_SIMD_TABLE(SumHead);
KVS_SIMD_TABLE(VoteTile);

void ScoreTokensSimd(const ScoreTokensWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(ScoreTokensItem)(work[i]); });
}

void VoteSimd(const VoteWork& work, Executor& executor) {
  executor.ParallelFor(work.heads, [&work](int64_t h) { KVS_SIMD_CALL(SumHead)(work, h); });
  const int64_t tiles = (work.n + kVoteTile - 1) / kVoteTile;
  executor.ParallelFor(tiles, [&work](int64_t i) { KVS_SIMD_CALL(VoteTile)(work, i); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
