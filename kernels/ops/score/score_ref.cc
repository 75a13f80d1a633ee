// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "kernels/ops/score/score.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

template <typename T>
double ScoreQuery(const ScoreWork& w, const float* q, const std::byte* row) {
  const T* a = reinterpret_cast<const T*>(row);
  const T* b = reinterpret_cast<const T*>(row + w.second_offset);
  double sum = 0, variance = 0;
  for (int c = 0; c < w.rows.dim; ++c) {
    const double qc = q[c], x = qc * ToFloat(a[c]);
    sum += w.kind == ScoreWork::Kind::kMinMax ? std::max(x, qc * ToFloat(b[c])) : x;
    if (w.kind == ScoreWork::Kind::kDeviation) variance += qc * qc * ToFloat(b[c]);
  }
  return sum + 2 * std::sqrt(variance);
}

template <typename T>
void ScoreOne(const ScoreWork& w) {
  for (int32_t u = w.units.begin; u < w.units.end; ++u) {
    double best = -std::numeric_limits<double>::infinity();
    for (int32_t i = 0; i < w.queries; ++i) {
      best = std::max(best, ScoreQuery<T>(w, w.q + int64_t{i} * w.rows.dim, w.rows.Row(u)));
    }
    float& out = w.out[u - w.units.begin];
    out = static_cast<float>(w.accumulate ? out + best : best);
  }
}

}  // namespace

void ScoreRef(const ScoreWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    WithElement(work[i].rows.dtype, [&]<typename T>() { ScoreOne<T>(work[i]); });
  });
}

}  // namespace kvstrata
