// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/pack_planes/plane_digits.h"

namespace kvstrata {
namespace {

void Score(const ScorePlanesWork& w) {
  const PlanesFormat& f = w.format;
  KVS_CHECK(f.IsValid());
  for (int32_t t = w.run.begin; t < w.run.end; ++t) {
    const int64_t group = t / f.tokens;
    const std::byte* const upper = w.upper + group * f.upper_bytes();
    const std::byte* const lower = w.lower + group * f.lower_bytes();
    double key[256];
    for (int32_t c = 0; c < f.dim; ++c) {
      key[c] = NumberAt<double>(f, upper, lower, f.planes(), {PlanesSide::kKeys, t % f.tokens, c});
    }
    for (int32_t i = 0; i < w.queries; ++i) {
      double dot = 0;
      for (int32_t c = 0; c < f.dim; ++c) dot += double{w.q[int64_t{i} * f.dim + c]} * key[c];
      w.out[i * w.out_query + t - w.run.begin] = static_cast<float>(w.scale * dot);
    }
  }
}

}  // namespace

void ScorePlanes(const ScorePlanesWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { Score(work[i]); });
}

}  // namespace kvstrata
