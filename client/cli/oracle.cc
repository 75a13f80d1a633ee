// SPDX-License-Identifier: Apache-2.0
#include "client/cli/oracle.h"

#include <algorithm>
#include <cmath>

#include "client/cli/metrics.h"

namespace kvstrata::cli {
namespace {

std::vector<double> Rotated(const TraceShape& shape, const uint16_t* row, int64_t position) {
  std::vector<double> out(static_cast<size_t>(shape.head_dim));
  for (size_t c = 0; c < out.size(); ++c) out[c] = FromBf16(row[c]);
  shape.rotary.Rotate(position, out);
  return out;
}

// q . key of positions [0, n) of one KV head as if both were rotated; the query is that of position
// n - 1. A dot product depends on the distance alone: the query is rotated by it, the keys stay.
std::vector<double> RotatedScores(const TraceShape& shape, const KeyRows& keys, const uint16_t* q,
                                  int32_t n) {
  std::vector<double> scores(static_cast<size_t>(n));
  for (int32_t p = 0; p < n; ++p) {
    const std::vector<double> query = Rotated(shape, q, n - 1 - int64_t{p});
    const uint16_t* key = keys.first + p * keys.stride;
    double sum = 0;
    for (size_t c = 0; c < query.size(); ++c) sum += query[c] * double{FromBf16(key[c])};
    scores[static_cast<size_t>(p)] = sum;
  }
  return scores;
}

}  // namespace

Oracle::Oracle(const TraceShape& shape, const TraceLayer& layer, int32_t t)
    : shape_(shape),
      layer_(layer),
      scale_(1 / std::sqrt(double{static_cast<double>(shape.head_dim)})),
      heads_(static_cast<size_t>(shape.query_heads)) {
  const uint16_t* q = layer.q + (shape.tail + t) * shape.q_row();
  for (int32_t h = 0; h < shape.query_heads; ++h) {
    Head& head = heads_[static_cast<size_t>(h)];
    const int64_t kv_head = h / (shape.query_heads / shape.kv_heads);
    const KeyRows keys{layer.k + kv_head * shape.head_dim, shape.kv_row(), shape.head_dim};
    const uint16_t* query = q + int64_t{h} * shape.head_dim;
    head.scores = shape.rotary.dim > 0 ? RotatedScores(shape, keys, query, shape.prompt + t + 1)
                                       : Scores(keys, query, shape.prompt + t + 1);
    head.largest = *std::ranges::max_element(head.scores) * scale_;
    for (const double score : head.scores) head.weight += std::exp(score * scale_ - head.largest);
  }
}

double Oracle::Weight(const Head& head, int32_t position, double largest) const {
  return std::exp(head.scores[static_cast<size_t>(position)] * scale_ - largest);
}

double Oracle::MassOn(int32_t head, std::span<const int32_t> positions) const {
  const Head& h = heads_[static_cast<size_t>(head)];
  if (positions.size() == h.scores.size()) return 1;
  double mass = 0;
  for (const int32_t p : positions) mass += Weight(h, p, h.largest);
  return mass / h.weight;
}

std::vector<double> Oracle::AttendOver(int32_t head, std::span<const int32_t> positions) const {
  const Head& h = heads_[static_cast<size_t>(head)];
  std::vector<double> out(static_cast<size_t>(shape_.head_dim));
  if (positions.empty()) return out;
  const auto score = [&h](int32_t p) { return h.scores[static_cast<size_t>(p)]; };
  const double largest = score(*std::ranges::max_element(positions, {}, score)) * scale_;
  const int64_t kv_head = head / (shape_.query_heads / shape_.kv_heads);
  double total = 0;
  for (const int32_t p : positions) {
    const double w = Weight(h, p, largest);
    const uint16_t* v = layer_.v + p * shape_.kv_row() + kv_head * shape_.head_dim;
    for (size_t c = 0; c < out.size(); ++c) out[c] += w * double{FromBf16(v[c])};
    total += w;
  }
  for (double& x : out) x /= total;
  return out;
}

std::vector<int32_t> Oracle::Best(int32_t head, int32_t k) const {
  return BestOf(heads_[static_cast<size_t>(head)].scores, k);
}

}  // namespace kvstrata::cli
