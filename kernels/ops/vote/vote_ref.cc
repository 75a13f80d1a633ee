// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ops/vote/vote.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

template <typename T>
void Score(const ScoreTokensWork& w) {
  for (int32_t t = w.run.begin; t < w.run.end; ++t) {
    const T* row = reinterpret_cast<const T*>(w.rows.Row(t));
    for (int32_t i = 0; i < w.queries; ++i) {
      const float* q = w.q + int64_t{i} * w.rows.dim;
      double sum = 0;
      for (int c = 0; c < w.rows.dim; ++c) sum += static_cast<double>(q[c]) * ToFloat(row[c]);
      w.out[i * w.out_query + (t - w.run.begin)] = static_cast<float>(w.scale * sum);
    }
  }
}

// A head without any score above -inf votes for nothing.
double ShiftOf(float max) { return max == -std::numeric_limits<float>::infinity() ? 0 : max; }

void SumHead(const VoteWork& w, int64_t h) {
  const float* logits = w.logits + h * w.stride;
  float max = -std::numeric_limits<float>::infinity();
  for (int32_t t = 0; t < w.n; ++t) max = std::max(max, logits[t]);
  double sum = 0;
  for (int32_t t = 0; t < w.n; ++t) sum += std::exp(logits[t] - ShiftOf(max));
  w.max[h] = max;
  w.sum[h] = static_cast<float>(w.WithAlways(h, ShiftOf(max), sum));
}

void VoteFor(const VoteWork& w, int64_t t) {
  double votes = 0;
  for (int32_t h = 0; h < w.heads; ++h) {
    if (w.sum[h] == 0) continue;
    votes += std::exp(w.logits[h * w.stride + t] - ShiftOf(w.max[h])) / w.sum[h];
  }
  w.votes[t] = static_cast<float>(votes);
}

}  // namespace

double VoteWork::WithAlways(int64_t head, double shift, double own) const {
  double total = noise == nullptr ? own : own * std::exp(-noise[head] / 2);
  for (int32_t i = 0; i < always_n; ++i) total += std::exp(always[head * always_n + i] - shift);
  return total;
}

void ScoreTokensRef(const ScoreTokensWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    WithElement(work[i].rows.dtype, [&]<typename T>() { Score<T>(work[i]); });
  });
}

void VoteRef(const VoteWork& work, Executor& executor) {
  executor.ParallelFor(work.heads, [&work](int64_t h) { SumHead(work, h); });
  executor.ParallelFor(work.n, [&work](int64_t t) { VoteFor(work, t); });
}

}  // namespace kvstrata
