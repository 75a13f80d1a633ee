// SPDX-License-Identifier: Apache-2.0
// Keys that give logits which a trained model had: recorded_logits.json, made by
// research/record_logits.py.
//
// Queries of a KV head are orthogonal to each other, of the length by which rounding to two bits
// adds to logits what it added in the model. A key is random normal but for its parts along the
// queries, which make its logits those of some token that was recorded. Strips of 16 neighbours
// stay together and are drawn at random, so that of a context of any length the same share is fine:
// the rule's limits are divided by N.
#pragma once

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops/elements.h"

namespace kvstrata::cuda {

struct RecordedShape {
  int kv_heads, group, dim, page_tokens;
};

class RecordedKeys {
 public:
  RecordedKeys(const std::string& file, const RecordedShape& shape)
      : shape_(shape), rng_(std::random_device{}()) {
    std::ifstream in(file);
    const auto items = nlohmann::json::parse(in).at("items");
    queries_.resize(size_t(shape.kv_heads) * shape.group * shape.dim);
    block_.resize(size_t(kPages) * 2 * shape.kv_heads * shape.page_tokens * shape.dim);
    for (BF16& x : block_) x = FromFloat<BF16>(normal_(rng_));
    for (int head = 0; head < shape.kv_heads; ++head) {
      const auto& item = items.at(static_cast<size_t>(head) % items.size());
      MakeQueries(head, item.at("half_variance").get<std::vector<double>>());
      MakeKeys(head, item.at("levels").get<std::string>());
      recent_.push_back(item.at("recent").get<std::vector<double>>());
    }
  }

  // Pages of one layer each: [page][keys, then values][kv_head][token][dim].
  const std::vector<BF16>& block() const { return block_; }
  const std::vector<float>& queries() const { return queries_; }  // [kv_heads * group][dim]

  // Keys of the last page of a context, [kv_head][token][dim].
  std::vector<BF16> LastKeys(int tokens) {
    std::vector<BF16> keys;
    std::vector<float> key(static_cast<size_t>(shape_.dim));
    for (int head = 0; head < shape_.kv_heads; ++head) {
      for (int token = 0; token < shape_.page_tokens; ++token) {
        for (float& x : key) x = normal_(rng_);
        for (int g = 0; g < shape_.group; ++g) {
          SetLogit(Query(head, g), LastLogit(head, g, tokens), key.data());
        }
        for (const float x : key) keys.push_back(FromFloat<BF16>(x));
      }
    }
    return keys;
  }

 private:
  static constexpr int kPages = 251, kStrip = 16;
  // The step of a normal channel's 64 numbers is 4.75 / 255, its square 1 / 2880 in the mean. The
  // variance of digits below plane 0 is 341 steps squared.
  static constexpr double kHalfVariance = 341.25 / 2880 / 2;

  // Other tokens' weights, times N, have the mean 1 - `recent`.
  double LastLogit(int head, int g, int tokens) const {
    const auto& of_heads = recent_[static_cast<size_t>(head)];
    const double recent = std::min(of_heads[static_cast<size_t>(g) % of_heads.size()], 0.9999);
    return std::log(recent * tokens / shape_.page_tokens);
  }

  float* Query(int head, int g) {
    return &queries_[static_cast<size_t>((head * shape_.group + g) * shape_.dim)];
  }

  void MakeQueries(int head, const std::vector<double>& half_variances) {
    for (int g = 0; g < shape_.group; ++g) {
      float* const q = Query(head, g);
      for (int c = 0; c < shape_.dim; ++c) q[c] = normal_(rng_);
      for (int before = 0; before < g; ++before) Remove(Query(head, before), q);
      // half = kHalfVariance |q|^2 / dim
      const double half = half_variances[static_cast<size_t>(g) % half_variances.size()];
      const double length = std::sqrt(half / kHalfVariance * shape_.dim);
      const auto factor = static_cast<float>(length / std::sqrt(Product(q, q)));
      for (int c = 0; c < shape_.dim; ++c) q[c] *= factor;
    }
  }

  void MakeKeys(int head, const std::string& levels) {
    const int strips = static_cast<int>(levels.size()) / kStrip / shape_.group;
    std::vector<float> key(static_cast<size_t>(shape_.dim));
    for (int page = 0; page < kPages; ++page) {
      for (int token = 0; token < shape_.page_tokens; ++token) {
        if (token % kStrip == 0) strip_ = static_cast<int>(rng_() % static_cast<uint32_t>(strips));
        for (float& x : key) x = normal_(rng_);
        const char* const of_token =
            &levels[static_cast<size_t>((strip_ * kStrip + token % kStrip) * shape_.group)];
        for (int g = 0; g < shape_.group; ++g) {
          SetLogit(Query(head, g), -6 + 0.25 * (of_token[g] - '0'), key.data());
        }
        BF16* const to = KeyAt(page, head, token);
        for (int c = 0; c < shape_.dim; ++c) to[c] = FromFloat<BF16>(key[static_cast<size_t>(c)]);
      }
    }
  }
  BF16* KeyAt(int page, int head, int token) {
    const int row = (page * 2 * shape_.kv_heads + head) * shape_.page_tokens + token;
    return &block_[static_cast<size_t>(row) * shape_.dim];
  }

  double Product(const float* x, const float* y) const {
    double sum = 0;
    for (int c = 0; c < shape_.dim; ++c) sum += double{x[c]} * y[c];
    return sum;
  }
  void Add(const float* direction, double factor, float* to) const {
    for (int c = 0; c < shape_.dim; ++c) to[c] += static_cast<float>(factor * direction[c]);
  }
  void Remove(const float* direction, float* from) const {
    Add(direction, -Product(direction, from) / Product(direction, direction), from);
  }
  // Queries are orthogonal: one logit's part is no other's.
  void SetLogit(const float* query, double logit, float* key) const {
    const double wanted = logit * std::sqrt(shape_.dim);  // logits are divided by that
    Add(query, (wanted - Product(query, key)) / Product(query, query), key);
  }

  const RecordedShape shape_;
  std::mt19937 rng_;
  std::normal_distribution<float> normal_;
  std::vector<float> queries_;
  std::vector<BF16> block_;
  std::vector<std::vector<double>> recent_;  // [kv_head][group], shares of a head's weight
  int strip_ = 0;
};

}  // namespace kvstrata::cuda
