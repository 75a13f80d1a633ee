// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ops/score_bits/score_bits_simd.cc"
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/ops/score_bits/bits_dot-inl.h"
#include "kernels/ops/score_bits/score_bits.h"

HWY_BEFORE_NAMESPACE();
namespace kvstrata {
namespace HWY_NAMESPACE {
namespace {

// Logits of `run`, tokens of one group: out[h * out_query + t - run.begin]. Asks for `next`, the
// group that follows, meanwhile.
template <int kBits, int H>
HWY_NOINLINE void ScoreGroup(const QuantisedGroup& f, const std::byte* group, const std::byte* next,
                             const FoldedQueries& folded, Run run, float* out, int64_t out_query) {
  constexpr int n = static_cast<int>(kN);
  const int64_t share = f.bytes() * n / f.tokens;
  for (int t = run.begin / n * n; t < run.end; t += n) {
    Prefetch(next, t / n * share, (t / n + 1) * share);
    if (t >= run.begin && t + n <= run.end) {
      ScoreVector<kBits, H>(f, group, t, folded, out + (t - run.begin), out_query);
      continue;
    }
    float edge[H * n];
    ScoreVector<kBits, H>(f, group, t, folded, edge, n);
    const int begin = std::max(t, run.begin), end = std::min(t + n, run.end);
    for (int h = 0; h < H; ++h) {
      const float* from = edge + h * n - t;
      std::copy(from + begin, from + end, out + h * out_query + (begin - run.begin));
    }
  }
}

// Queries [first, first + H) over the whole run.
template <int kBits, int H>
HWY_INLINE void ScoreQueries(const ScoreBitsWork& w, int first) {
  const QuantisedGroup& f = w.rows.format;
  FoldedQueries folded;
  float* out = w.out + first * w.out_query;
  for (int32_t t = w.run.begin; t < w.run.end;) {
    const int32_t start = t / f.tokens * f.tokens, end = std::min(start + f.tokens, w.run.end);
    const std::byte* group = w.rows.Group(t / f.tokens);
    Fold<H>(f, group, {}, w.q + int64_t{first} * f.dim, w.scale, folded);
    const std::byte* next = end < w.run.end ? w.rows.Group(end / f.tokens) : nullptr;
    ScoreGroup<kBits, H>(f, group, next, folded, {t - start, end - start}, out + (t - w.run.begin),
                         w.out_query);
    t = end;
  }
}

template <int kBits>
HWY_INLINE void ScoreAll(const ScoreBitsWork& w) {
  for (int first = 0; first < w.queries; first += kQueries) {
    switch (w.queries - first) {
      case 1:
        ScoreQueries<kBits, 1>(w, first);
        break;
      case 2:
        ScoreQueries<kBits, 2>(w, first);
        break;
      case 3:
        ScoreQueries<kBits, 3>(w, first);
        break;
      default:
        ScoreQueries<kBits, kQueries>(w, first);
    }
  }
}

void ScoreBitsItem(const ScoreBitsWork& w) {
  KVS_CHECK(w.rows.format.IsValid());
  switch (w.rows.format.bits) {
    case 2:
      return ScoreAll<2>(w);
    case 3:
      return ScoreAll<3>(w);
    default:
      return ScoreAll<4>(w);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstrata
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstrata {

KVS_SIMD_TABLE(ScoreBitsItem);

void ScoreBitsSimd(const ScoreBitsWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { KVS_SIMD_CALL(ScoreBitsItem)(work[i]); });
}

}  // namespace kvstrata
#endif  // HWY_ONCE
