// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "base/check.h"
#include "kernels/ops/quantise_keys/noise_groups.h"
#include "kernels/ops/score_bits/score_bits.h"
#include "kernels/pages/dtype.h"

namespace kvstrata {
namespace {

constexpr int32_t kDimMax = 256;

// The mean of step^2 of each channel over the groups that stand for all.
void MeanSquares(const BitsNoiseWork& w, double* squares) {
  const QuantisedGroup& f = w.rows.format;
  if (w.groups == 0) return;
  int32_t count = 0;
  for (int32_t g = FirstOfNoise(w.groups); g < w.groups; g += kNoiseEvery, ++count) {
    const std::byte* const steps = w.rows.Group(g) + f.step_offset();
    for (int32_t c = 0; c < f.dim; ++c) {
      F16 step;
      std::memcpy(&step, steps + 2 * c, 2);
      const double x = ToFloat(step);
      squares[c] += x * x;
    }
  }
  for (int32_t c = 0; c < f.dim; ++c) squares[c] /= count;
}

}  // namespace

void BitsNoise(const BitsNoiseWork& w) {
  KVS_CHECK(w.rows.format.IsValid());
  double squares[kDimMax] = {};
  MeanSquares(w, squares);
  for (int32_t i = 0; i < w.queries; ++i) {
    const float* const q = w.q + int64_t{i} * w.rows.format.dim;
    double sum = 0;
    for (int32_t c = 0; c < w.rows.format.dim; ++c) sum += double{q[c]} * q[c] * squares[c];
    w.out[i] = static_cast<float>(double{w.scale} * w.scale * sum / 12);
  }
}

}  // namespace kvstrata
