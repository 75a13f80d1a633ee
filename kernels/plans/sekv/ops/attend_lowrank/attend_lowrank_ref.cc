// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "base/check.h"
#include "kernels/ops/attend_coarse/softmax_ref.h"
#include "kernels/plans/sekv/ops/attend_lowrank/attend_lowrank.h"

namespace kvstrata {
namespace {

// Adds scale * (rows of the span . q) to `scores`, in factor space.
void AddScores(const AttendLowRankWork& w, const LowRankSpan& span, const float* q,
               std::vector<double>& scores) {
  const LowRankRows& k = span.k;
  std::vector<double> t(q, q + w.dim);
  if (k.rank >= 0) {
    t.assign(k.rank, 0.0);
    for (int j = 0; j < k.rank; ++j) {
      for (int c = 0; c < w.dim; ++c) {
        t[j] += static_cast<double>(q[c]) * ToFloat(k.right[int64_t{j} * w.dim + c]);
      }
    }
  }
  const auto width = static_cast<int64_t>(t.size());
  for (int i = 0; i < span.n; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += t[j] * ToFloat(k.left[i * width + j]);
    scores.push_back(w.scale * sum);
  }
}

// Adds the weighted sum of the span's values to o.
void AddValues(const AttendLowRankWork& w, const LowRankSpan& span, const double* weights,
               std::vector<double>& o) {
  const LowRankRows& v = span.v;
  const int64_t width = v.rank < 0 ? w.dim : v.rank;
  std::vector<double> u(width, 0.0);
  for (int i = 0; i < span.n; ++i) {
    for (int64_t j = 0; j < width; ++j) u[j] += weights[i] * ToFloat(v.left[i * width + j]);
  }
  for (int c = 0; c < w.dim; ++c) {
    if (v.rank < 0) o[c] += u[c];
    for (int j = 0; j < v.rank; ++j) o[c] += u[j] * ToFloat(v.right[int64_t{j} * w.dim + c]);
  }
}

void AttendOne(const AttendLowRankWork& w, const float* q, int64_t out) {
  std::vector<double> weights, o(w.dim, 0.0);
  for (int s = 0; s < w.span_count; ++s) AddScores(w, w.spans[s], q, weights);
  const SoftmaxSums sums = WeighScores(weights);
  int64_t first = 0;
  for (int s = 0; s < w.span_count; first += w.spans[s++].n) {
    AddValues(w, w.spans[s], weights.data() + first, o);
  }
  w.m[out] = static_cast<float>(sums.m);
  w.l[out] = static_cast<float>(sums.l);
  for (int c = 0; c < w.dim; ++c) w.o[out * w.dim + c] = static_cast<float>(o[c]);
}

}  // namespace

void AttendLowRankRef(const AttendLowRankWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t at) {
    const AttendLowRankWork& w = work[at];
    for (int i = 0; i < w.queries; ++i) {
      for (int g = 0; g < w.group; ++g) {
        AttendOne(w, w.q + i * w.q_token + int64_t{g} * w.dim, int64_t{i} * w.row_token + g);
      }
    }
  });
}

}  // namespace kvstrata
