// SPDX-License-Identifier: Apache-2.0
// Random inputs of op attend_planes, sealed by `ref`.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/ops/pack_planes/plane_digits.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

struct PlanesShape {
  int dim = 128, keep = 8, group = 4, kv_heads = 2, batch = 2, groups_max = 12, block_groups = 4;
  int raw_parts = 1;
  DType q_dtype = DType::kBF16;
  PlanesRule rule = {.fine_above = 2, .skip_below = 1, .sample = 16};
  float sharpness = 2;   // how much queries have of some token's key
  float value_size = 1;  // values'
  float spike = 0;       // over 0: one token of each head has a logit as large as that
  bool merges = true;    // to the output, else to a partial
  bool ahead = false;
  bool lower_on_host = false;  // else on the GPU
  int hot_in_blocks = 0;       // copies of a group behind the upper runs of its block
};

// Keys or values that count: by plane 0, and by all that are stored. [token][dim]
struct PlanesNumbers {
  std::vector<double> coarse_keys, fine_keys, coarse_values, fine_values;
};

// Partials of raw rows. [part][row], o [part][row][dim]
struct RawPartials {
  std::vector<float> m, l, o;
};

// Groups of every item (a sequence and a KV head), queries and lengths, in host memory.
class PlanesInputs {
 public:
  PlanesInputs(const PlanesShape& shape, Rng& rng) : s_(shape), rng_(rng) {
    format_ = {s_.dim, kUnit, s_.keep};
    upper_.resize(Items() * s_.groups_max * format_.upper_bytes());
    lower_.resize(Items() * s_.groups_max * format_.lower_bytes());
    numbers_.resize(Items());
    for (size_t item = 0; item < Items(); ++item) Pack(item);
    FillQueries();
  }

  // N of each sequence, and by how many groups those that seal them lag.
  void SetTokens(const std::vector<int32_t>& tokens, int lag) {
    tokens_ = tokens;
    groups_.clear();
    for (int32_t n : tokens) {
      groups_.push_back(std::clamp((n - 1) / kUnit - lag, 0, s_.groups_max));
    }
  }
  // All of a sequence is to be fine.
  void AttendInFull(size_t sequence) { tokens_[sequence] = 0; }
  void SetQueries(const std::vector<float>& q) { q_ = q; }  // numbers of q_dtype

  const PlanesShape& shape() const { return s_; }
  const PlanesFormat& format() const { return format_; }
  const std::vector<std::byte>& upper() const { return upper_; }  // [item][group]
  const std::vector<std::byte>& lower() const { return lower_; }
  const PlanesNumbers& numbers(size_t item) const { return numbers_[item]; }
  const std::vector<float>& q() const { return q_; }  // [row][dim]
  const RawPartials& raw() const { return raw_; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(s_.dim)); }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<int32_t>& groups() const { return groups_; }
  size_t Items() const { return static_cast<size_t>(s_.batch) * s_.kv_heads; }
  size_t Rows() const { return Items() * s_.group; }
  size_t Stride() const { return static_cast<size_t>(s_.groups_max) * kUnit; }  // tokens
  int32_t Tokens(size_t item) const { return tokens_[item / s_.kv_heads]; }
  int Sealed(size_t item) const { return groups_[item / s_.kv_heads] * kUnit; }
  int Start(size_t item) const { return std::min(s_.rule.sinks, Sealed(item)); }
  int Stop(size_t item) const {
    const int before = std::max(Tokens(item) - s_.rule.recent, 0);
    return std::max(Start(item), std::min(before, Sealed(item)));
  }

  const std::byte* Upper(size_t item, int g) const {
    return &upper_[(item * s_.groups_max + g) * format_.upper_bytes()];
  }
  const std::byte* Lower(size_t item, int g) const {
    return &lower_[(item * s_.groups_max + g) * format_.lower_bytes()];
  }
  std::string Name(size_t item) const {
    return "sequence " + std::to_string(item / s_.kv_heads) + " of " +
           std::to_string(Tokens(item)) + " tokens, KV head " + std::to_string(item % s_.kv_heads);
  }

  double RawLogSum(size_t row) const {
    double sum = 0;
    for (int part = 0; part < s_.raw_parts; ++part) {
      sum += std::exp(double{raw_.m[part * Rows() + row]}) * raw_.l[part * Rows() + row];
    }
    return std::log(sum);
  }

 private:
  static constexpr int kUnit = 64;

  // Random rows of one item, sealed by `ref`, and the numbers that they count as.
  void Pack(size_t item) {
    const int tokens = s_.groups_max * kUnit;
    std::vector<float> keys(static_cast<size_t>(tokens) * s_.dim), values(keys.size());
    std::vector<float> mean(s_.dim);
    for (float& x : mean) x = Normal(rng_);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = Normal(rng_) + mean[i % s_.dim];
    for (float& x : values) x = s_.value_size * Normal(rng_);
    std::vector<std::byte> key_bytes = Encoded(keys, DType::kBF16);
    std::vector<std::byte> value_bytes = Encoded(values, DType::kBF16);
    keys_.push_back(Floats(DType::kBF16, key_bytes));
    std::byte *const key_page = key_bytes.data(), *const value_page = value_bytes.data();
    const int64_t row = int64_t{s_.dim} * 2;
    for (int g = 0; g < s_.groups_max; ++g) {
      PackPlanesWork w;
      w.keys = {&key_page, 0, row, tokens, s_.dim, DType::kBF16};
      w.values = {&value_page, 0, row, tokens, s_.dim, DType::kBF16};
      w.begin = g * kUnit;
      w.format = format_;
      w.upper = const_cast<std::byte*>(Upper(item, g));
      w.lower = const_cast<std::byte*>(Lower(item, g));
      PackPlanesRef(&w, 1, InlineExecutor());
      Widen(item, g);
    }
  }
  void Widen(size_t item, int g) {
    PlanesNumbers& n = numbers_[item];
    for (int t = 0; t < kUnit; ++t) {
      for (int c = 0; c < s_.dim; ++c) {
        const auto number = [&](PlanesSide side, int planes) {
          return NumberAt<double>(format_, Upper(item, g), Lower(item, g), planes, {side, t, c});
        };
        n.coarse_keys.push_back(number(PlanesSide::kKeys, 1));
        n.fine_keys.push_back(number(PlanesSide::kKeys, format_.planes()));
        n.coarse_values.push_back(number(PlanesSide::kValues, 1));
        n.fine_values.push_back(number(PlanesSide::kValues, format_.planes()));
      }
    }
  }

  // Queries have some of the keys of a few tokens; raw rows' partials are about as heavy.
  void FillQueries() {
    q_.resize(Rows() * s_.dim);
    for (size_t row = 0; row < Rows(); ++row) {
      const std::vector<float>& keys = keys_[row / s_.group];
      const size_t token = rng_() % (static_cast<size_t>(s_.groups_max) * kUnit);
      const float* key = &keys[token * s_.dim];
      float square = 0;
      for (int c = 0; c < s_.dim; ++c) square += key[c] * key[c];
      const float share =
          s_.spike > 0 ? s_.spike / (scale() * square) : s_.sharpness * Normal(rng_) * 0.2f;
      for (int c = 0; c < s_.dim; ++c) {
        const float x = s_.sharpness * Normal(rng_) + share * key[c];
        q_[row * s_.dim + c] = RoundedTo(s_.q_dtype, x);
      }
    }
    for (size_t i = 0; i < Rows() * s_.raw_parts; ++i) {
      raw_.m.push_back(2 * Normal(rng_));
      raw_.l.push_back(1 + static_cast<float>(Below(rng_, 20)));
      for (int c = 0; c < s_.dim; ++c) raw_.o.push_back(raw_.l.back() * Normal(rng_));
    }
  }

  const PlanesShape s_;
  Rng& rng_;
  PlanesFormat format_;
  std::vector<std::byte> upper_, lower_;
  std::vector<std::vector<float>> keys_;  // an item's, before they are sealed
  std::vector<PlanesNumbers> numbers_;
  std::vector<float> q_;
  RawPartials raw_;
  std::vector<int32_t> tokens_, groups_;
};

}  // namespace kvstrata::cuda
