// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "base/check.h"
#include "kernels/ops/attend_coarse/attend_coarse.h"
#include "kernels/ops/attend_coarse/softmax_ref.h"
#include "kernels/pages/element.h"

namespace kvstrata {
namespace {

template <typename T>
double Logit(const AttendCoarseWork& w, const float* q, int32_t u) {
  const T* k = reinterpret_cast<const T*>(w.k.Row(u));
  double dot = 0;
  for (int c = 0; c < w.k.dim; ++c) dot += static_cast<double>(q[c]) * ToFloat(k[c]);
  return w.scale * dot + (w.log_count != nullptr ? w.log_count[u] : w.log_count_all);
}

template <typename T>
void AttendOne(const AttendCoarseWork& w, const std::vector<int32_t>& units, const float* q,
               int64_t out) {
  const int dim = w.v.dim;
  std::vector<double> weights, o(dim, 0.0);
  for (int32_t u : units) weights.push_back(Logit<T>(w, q, u));
  const SoftmaxSums sums = WeighScores(weights);
  for (size_t i = 0; i < units.size(); ++i) {
    const T* v = reinterpret_cast<const T*>(w.v.Row(units[i]));
    for (int c = 0; c < dim; ++c) o[c] += weights[i] * ToFloat(v[c]);
  }
  w.m[out] = static_cast<float>(sums.m);
  w.l[out] = static_cast<float>(sums.l);
  for (int c = 0; c < dim; ++c) w.o[out * dim + c] = static_cast<float>(o[c]);
}

template <typename T>
void Attend(const AttendCoarseWork& w) {
  std::vector<int32_t> units;
  for (int i = 0; i < w.run_count; ++i) {
    for (int32_t u = w.runs[i].begin; u < w.runs[i].end; ++u) units.push_back(u);
  }
  for (int i = 0; i < w.queries; ++i) {
    for (int g = 0; g < w.group; ++g) {
      AttendOne<T>(w, units, w.q + i * w.q_token + int64_t{g} * w.k.dim,
                   int64_t{i} * w.row_token + g);
    }
  }
}

}  // namespace

void AttendCoarseRef(const AttendCoarseWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    const AttendCoarseWork& w = work[i];
    KVS_CHECK(w.k.dtype == w.v.dtype && w.k.dim == w.v.dim);
    WithElement(w.k.dtype, [&]<typename T>() { Attend<T>(w); });
  });
}

}  // namespace kvstrata
