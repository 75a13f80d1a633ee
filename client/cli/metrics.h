// SPDX-License-Identifier: Apache-2.0
// Metrics of docs/spec/README.md over one replay: distributions, oracle top-k, relative error.
// Pure functions and values; double precision.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvstrata::cli {

// Samples and what tables show of them. 0 when there are none.
class Distribution {
 public:
  void Add(double sample) { samples_.push_back(sample); }
  size_t size() const { return samples_.size(); }
  double Mean() const;
  // Linearly interpolated, p in [0, 100]. Sorts a copy.
  double Percentile(double p) const;

 private:
  std::vector<double> samples_;
};

// ||a - b|| / ||b||; 0 when both are zero, infinite when only b is. REQUIRES: equal sizes.
double RelativeError(std::span<const float> a, std::span<const float> b);
// ||a - b|| / ||of||, with the same rules.
double RelativeDistance(std::span<const double> a, std::span<const double> b,
                        std::span<const double> of);
// a . b / (|a| |b|); 0 when either is zero. bf16. REQUIRES: equal sizes.
double Cosine(std::span<const uint16_t> a, std::span<const uint16_t> b);

// bf16 rows of one KV head within [token][kv_heads][head_dim].
struct KeyRows {
  const uint16_t* first = nullptr;  // key of token 0
  int64_t stride = 0;               // values between tokens
  int32_t head_dim = 0;
};

// q . key of the positions [0, n); q bf16 [head_dim].
std::vector<double> Scores(const KeyRows& keys, const uint16_t* q, int32_t n);
// The k positions with the largest score, ties to the lower position; ascending.
// REQUIRES: 0 <= k <= scores.size().
std::vector<int32_t> BestOf(std::span<const double> scores, int32_t k);

// |a and b| / |b|; 1 when b is empty. REQUIRES: both ascending.
double Overlap(std::span<const int32_t> a, std::span<const int32_t> b);

// At most `most` indices of [0, n), evenly spread, first and last included.
std::vector<int32_t> SpreadOver(int32_t n, int32_t most);

}  // namespace kvstrata::cli
