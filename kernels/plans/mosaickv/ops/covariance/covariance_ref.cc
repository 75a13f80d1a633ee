// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "kernels/pages/element.h"
#include "kernels/plans/mosaickv/ops/covariance/covariance.h"

namespace kvstrata {
namespace {

template <typename T>
void Covariance(const CovarianceWork& w) {
  const int dim = w.rows.dim;
  if (!w.accumulate) std::fill(w.out, w.out + int64_t{dim} * dim, 0.0);
  std::vector<double> x(dim);
  for (int32_t t = w.run.begin; t < w.run.end; ++t) {
    const T* row = reinterpret_cast<const T*>(w.rows.Row(t));
    for (int c = 0; c < dim; ++c) x[c] = ToFloat(row[c]);
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) w.out[int64_t{i} * dim + j] += x[i] * x[j];
    }
  }
}

}  // namespace

void CovarianceRef(const CovarianceWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    WithElement(work[i].rows.dtype, [&]<typename T>() { Covariance<T>(work[i]); });
  });
}

}  // namespace kvstrata
