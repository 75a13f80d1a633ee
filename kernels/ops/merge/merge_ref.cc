// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ops/merge/merge.h"

namespace kvstrata {
namespace {

void MergeRow(const MergeWork& w, int32_t row) {
  const double none = -std::numeric_limits<double>::infinity();
  double top = none;
  for (int32_t j = 0; j < w.parts; ++j) {
    top = std::max(top, static_cast<double>(w.m[int64_t{j} * w.rows + row]));
  }
  std::vector<double> o(w.dim, 0.0);
  double l = 0;
  for (int32_t j = 0; j < w.parts; ++j) {
    const int64_t at = int64_t{j} * w.rows + row;
    if (std::isinf(w.m[at]) && w.m[at] < 0) continue;  // empty
    const double weight = std::exp(w.m[at] - top);
    l += weight * w.l[at];
    for (int c = 0; c < w.dim; ++c) o[c] += weight * w.o[at * w.dim + c];
  }
  const int32_t token = row / w.group, g = row % w.group;
  float* out = w.out + token * w.out_token + int64_t{g} * w.dim;
  for (int c = 0; c < w.dim; ++c) out[c] = l == 0 ? 0.0f : static_cast<float>(o[c] / l);
  if (w.lse != nullptr) {
    w.lse[token * w.lse_token + g] = static_cast<float>(l == 0 ? none : top + std::log(l));
  }
}

}  // namespace

void MergeRef(const MergeWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) {
    for (int32_t row = 0; row < work[i].rows; ++row) MergeRow(work[i], row);
  });
}

}  // namespace kvstrata
