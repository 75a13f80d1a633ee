// SPDX-License-Identifier: Apache-2.0
#include "client/cli/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "client/cli/trace.h"

namespace kvstrata::cli {

double Distribution::Mean() const {
  if (samples_.empty()) return 0;
  return std::accumulate(samples_.begin(), samples_.end(), 0.0) /
         static_cast<double>(samples_.size());
}

double Distribution::Percentile(double p) const {
  if (samples_.empty()) return 0;
  std::vector<double> sorted = samples_;
  std::sort(sorted.begin(), sorted.end());
  const double rank = p / 100 * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(rank);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (rank - static_cast<double>(below));
}

double RelativeError(std::span<const float> a, std::span<const float> b) {
  KVS_CHECK(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = double{a[i]} - double{b[i]};
    difference += d * d;
    norm += double{b[i]} * double{b[i]};
  }
  if (difference == 0) return 0;
  return norm == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(difference / norm);
}

double RelativeDistance(std::span<const double> a, std::span<const double> b,
                        std::span<const double> of) {
  KVS_CHECK(a.size() == b.size() && a.size() == of.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += of[i] * of[i];
  }
  if (difference == 0) return 0;
  return norm == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(difference / norm);
}

double Cosine(std::span<const uint16_t> a, std::span<const uint16_t> b) {
  KVS_CHECK(a.size() == b.size());
  double dot = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = FromBf16(a[i]), y = FromBf16(b[i]);
    dot += x * y;
    aa += x * x;
    bb += y * y;
  }
  const double norms = std::sqrt(aa) * std::sqrt(bb);
  return norms > 0 ? dot / norms : 0;
}

std::vector<double> Scores(const KeyRows& keys, const uint16_t* q, int32_t n) {
  std::vector<double> query(static_cast<size_t>(keys.head_dim));
  for (size_t c = 0; c < query.size(); ++c) query[c] = FromBf16(q[c]);
  std::vector<double> scores(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) {
    const uint16_t* key = keys.first + i * keys.stride;
    double sum = 0;
    for (size_t c = 0; c < query.size(); ++c) sum += query[c] * double{FromBf16(key[c])};
    scores[static_cast<size_t>(i)] = sum;
  }
  return scores;
}

std::vector<int32_t> BestOf(std::span<const double> scores, int32_t k) {
  KVS_CHECK(0 <= k && static_cast<size_t>(k) <= scores.size());
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto better = [scores](int32_t a, int32_t b) {
    const double x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  if (static_cast<size_t>(k) < order.size()) {
    std::nth_element(order.begin(), order.begin() + k, order.end(), better);
  }
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

double Overlap(std::span<const int32_t> a, std::span<const int32_t> b) {
  if (b.empty()) return 1;
  size_t common = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    common += a[i] == b[j];
    const bool next_a = a[i] <= b[j], next_b = b[j] <= a[i];
    i += next_a;
    j += next_b;
  }
  return static_cast<double>(common) / static_cast<double>(b.size());
}

std::vector<int32_t> SpreadOver(int32_t n, int32_t most) {
  std::vector<int32_t> out;
  const int32_t count = std::min(n, most);
  for (int32_t i = 0; i < count; ++i) {
    out.push_back(count == 1 ? 0 : static_cast<int32_t>(int64_t{i} * (n - 1) / (count - 1)));
  }
  return out;
}

}  // namespace kvstrata::cli
