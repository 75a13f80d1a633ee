// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "base/check.h"
#include "kernels/ops/score_bits/score_bits.h"

namespace kvstrata {
namespace {

double HalfAt(const std::byte* p) {
  F16 h;
  std::memcpy(&h, p, 2);
  return ToFloat(h);
}

uint32_t CodeIn(const QuantisedGroup& f, const std::byte* plane, int32_t width, int32_t token,
                int32_t channel) {
  constexpr int kByteOf[] = {0, 2, 1, 3};
  const int32_t run = f.dim * width / 8, word = channel % run / 4;
  const int32_t bit = 8 * kByteOf[channel % 4] + width * (channel / run);
  uint32_t bits;
  std::memcpy(&bits, plane + 4 * (int64_t{word} * f.tokens + token), 4);
  return bits >> bit & ((1u << width) - 1);
}

uint32_t CodeOf(const QuantisedGroup& f, const std::byte* group, int32_t token, int32_t channel) {
  const uint32_t low = CodeIn(f, group + f.codes_offset(), f.plane_bits(), token, channel);
  return f.bits != 3 ? low : low | CodeIn(f, group + f.high_offset(), 1, token, channel) << 2;
}

void ScoreOne(const ScoreBitsWork& w) {
  const QuantisedGroup& f = w.rows.format;
  KVS_CHECK(f.IsValid());
  for (int32_t t = w.run.begin; t < w.run.end; ++t) {
    const std::byte* group = w.rows.Group(t / f.tokens);
    for (int32_t i = 0; i < w.queries; ++i) {
      double sum = 0;
      for (int32_t c = 0; c < f.dim; ++c) {
        const double minimum = HalfAt(group + 2 * c);
        const double step = HalfAt(group + f.step_offset() + 2 * c);
        sum += w.q[int64_t{i} * f.dim + c] * (minimum + step * CodeOf(f, group, t % f.tokens, c));
      }
      w.out[i * w.out_query + (t - w.run.begin)] = static_cast<float>(w.scale * sum);
    }
  }
}

}  // namespace

void ScoreBitsRef(const ScoreBitsWork* work, int64_t n, Executor& executor) {
  executor.ParallelFor(n, [work](int64_t i) { ScoreOne(work[i]); });
}

}  // namespace kvstrata
