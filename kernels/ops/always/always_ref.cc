// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ops/always/always.h"
#include "kernels/ops/elements.h"
#include "kernels/ops/score_bits/score_bits.h"

namespace kvstrata::cuda {
namespace {

// The queries of one KV head of one sequence.
struct Head {
  const AlwaysBatch& w;
  int sequence, head;

  int group() const { return w.query_heads / w.keys.kv_heads; }
  int64_t row() const { return int64_t{sequence} * w.query_heads + int64_t{head} * group(); }

  std::vector<float> Queries() const {
    std::vector<float> q(static_cast<size_t>(group()) * static_cast<size_t>(w.keys.head_dim));
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = static_cast<float>(
          ElementAt(w.q, w.q_dtype, row() * w.keys.head_dim + static_cast<int64_t>(i)));
    }
    return q;
  }

  double Logit(const float* q, int32_t t) const {
    const DeviceRows& k = w.keys;
    const uint64_t page = k.pages[int64_t{sequence} * k.page_stride + t / k.page_rows];
    const auto* at = reinterpret_cast<const std::byte*>(page) + k.offset + head * k.head_stride +
                     t % k.page_rows * k.row_stride;
    double sum = 0;
    for (int c = 0; c < k.head_dim; ++c) sum += double{q[c]} * ElementAt(at, k.dtype, c);
    return w.scale * sum;
  }

  void Write(int32_t tokens, const Candidates& units) const {
    const std::vector<float> q = Queries();
    std::vector<float> noise(static_cast<size_t>(group()));
    const DeviceGroups& g = w.groups;
    const std::vector<std::byte*> blocks = Blocks(tokens);
    BitsNoise({{g.format, blocks.data(), g.offset + head * g.head_stride, g.block_groups},
               (tokens - 1) / g.format.tokens,
               q.data(),
               group(),
               w.scale,
               noise.data()});
    for (int i = 0; i < group(); ++i) {
      WriteQuery(q.data() + i * w.keys.head_dim, noise[static_cast<size_t>(i)], tokens, units,
                 w.always + (row() + i) * kAlwaysFloats);
    }
  }

 private:
  std::vector<std::byte*> Blocks(int32_t tokens) const {
    const int32_t groups = (tokens - 1) / w.groups.format.tokens;
    std::vector<std::byte*> blocks;
    for (int32_t b = 0; b * w.groups.block_groups < groups; ++b) {
      blocks.push_back(reinterpret_cast<std::byte*>(
          w.groups.blocks[int64_t{sequence} * w.groups.block_stride + b]));
    }
    return blocks;
  }

  void WriteQuery(const float* q, float noise, int32_t tokens, const Candidates& units,
                  float* out) const {
    std::vector<double> x;
    for (int32_t t = 0; t < tokens; ++t) {
      if (t < units.first || t >= units.last) x.push_back(Logit(q, t) * std::log2(std::exp(1.0)));
    }
    const double max = *std::ranges::max_element(x);
    double sum = 0;
    for (const double y : x) sum += std::exp2(y - max);
    out[0] = static_cast<float>(max);
    out[1] = static_cast<float>(sum);
    out[2] = static_cast<float>(std::exp(-noise / 2.0));
  }
};

}  // namespace

void AlwaysRef(const AlwaysBatch& w) {
  for (int b = 0; b < w.batch; ++b) {
    const Candidates units = CandidateTokensOf(w.rule, w.tokens[b]);
    if (units.full) continue;
    for (int h = 0; h < w.keys.kv_heads; ++h) Head{w, b, h}.Write(w.tokens[b], units);
  }
}

}  // namespace kvstrata::cuda
