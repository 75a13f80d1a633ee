// SPDX-License-Identifier: Apache-2.0
// A toy engine over the C++ wrapper: keys, values and queries are functions of (sequence seed,
// position, layer), so that a test can recompute in double precision what attention over any set of
// positions must answer.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kvstrata/client.h"

namespace kvstrata::client::testing {

inline constexpr int kLayers = 2, kQueryHeads = 4, kKvHeads = 2, kDim = 64, kGroup = 2;

inline kvs::ModelDesc ToyModel(const std::string& digest = "toy") {
  return {.name = "toy",
          .digest = digest,
          .adapter = "",
          .layers = kLayers,
          .query_heads = kQueryHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .page_tokens = 16,
          .dtype = KVS_F32,
          .boundary_tokens = {}};
}

enum class Kind : uint64_t { kKey = 1, kValue = 2, kQuery = 3 };

// In [-1, 1), of everything given (splitmix64).
inline float Noise(Kind kind, uint64_t seed, int64_t position, int layer, int head, int c) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(position) * 0xBF58476D1CE4E5B9u +
               ((static_cast<uint64_t>(kind) * 64 + layer) * 64 + head) * 512 + c;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  const float unit = static_cast<float>(static_cast<int64_t>(x) >> 40) / 8388608.0f;
  return kind == Kind::kQuery ? 3 * unit : unit;
}

inline std::vector<float> RowsOf(Kind kind, uint64_t seed, int64_t first, int n, int layer) {
  const int heads = kind == Kind::kQuery ? kQueryHeads : kKvHeads;
  std::vector<float> rows;
  rows.reserve(static_cast<size_t>(n) * heads * kDim);
  for (int64_t t = first; t < first + n; ++t) {
    for (int h = 0; h < heads; ++h) {
      for (int c = 0; c < kDim; ++c) rows.push_back(Noise(kind, seed, t, layer, h, c));
    }
  }
  return rows;
}

// Attention of query head h at `position` over `attended`, in double: output, then its lse.
inline std::vector<double> Oracle(uint64_t seed, int64_t position, int layer, int h,
                                  const std::vector<int32_t>& attended) {
  std::vector<double> s;
  for (const int32_t t : attended) {
    double dot = 0;
    for (int c = 0; c < kDim; ++c) {
      dot += double{Noise(Kind::kQuery, seed, position, layer, h, c)} *
             Noise(Kind::kKey, seed, t, layer, h / kGroup, c);
    }
    s.push_back(dot / std::sqrt(double{kDim}));
  }
  const double top = *std::max_element(s.begin(), s.end());
  double sum = 0;
  for (double& x : s) sum += (x = std::exp(x - top));
  std::vector<double> out(kDim + 1);
  for (size_t i = 0; i < s.size(); ++i) {
    for (int c = 0; c < kDim; ++c) {
      out[c] += s[i] / sum * Noise(Kind::kValue, seed, attended[i], layer, h / kGroup, c);
    }
  }
  out[kDim] = top + std::log(sum);
  return out;
}

inline std::vector<int32_t> Iota(int32_t first, int32_t n) {
  std::vector<int32_t> v(n);
  std::iota(v.begin(), v.end(), first);
  return v;
}

// Token ids of a sequence that is told apart by its seed from the first token on.
inline std::vector<int32_t> Ids(uint64_t seed, int32_t first, int32_t n) {
  std::vector<int32_t> ids = Iota(first, n);
  for (int32_t& id : ids) id = static_cast<int32_t>((seed * 7919 + id * 31) % 32000);
  return ids;
}

// What a step answered: [layer][token][query head][dim], lse [layer][token][query head], and the
// positions attended by each KV head in each layer.
struct Answer {
  std::vector<std::vector<float>> out, lse;
  std::vector<std::vector<std::vector<int32_t>>> attended;
};

#define KVS_MUST(result)                                          \
  if (auto&& must_ = (result); !must_) {                          \
    ADD_FAILURE() << #result << ": " << must_.error().ToString(); \
    return {};                                                    \
  }

// One forward pass of `n` tokens of the sequence with that seed, from position `first`.
inline Answer RunStep(kvs::Session& session, const kvs::Sequence& sequence, uint64_t seed,
                      int32_t first, int n) {
  auto step = session.Begin(sequence, Ids(seed, first, n));
  KVS_MUST(step);
  Answer a;
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto k = RowsOf(Kind::kKey, seed, first, n, layer);
    const auto v = RowsOf(Kind::kValue, seed, first, n, layer);
    const auto q = RowsOf(Kind::kQuery, seed, first, n, layer);
    a.out.emplace_back(q.size());
    a.lse.emplace_back(static_cast<size_t>(n) * kQueryHeads);
    KVS_MUST(step->Append(layer, {k.data(), n, kKvHeads, kDim}, {v.data(), n, kKvHeads, kDim}));
    KVS_MUST(step->Attend(layer, {q.data(), n, kQueryHeads, kDim},
                          {a.out.back().data(), n, kQueryHeads, kDim}, a.lse.back().data()));
    uint32_t groups = 0;
    EXPECT_EQ(kvs_selection_groups(step->get(), 0, &groups), KVS_OK);
    a.attended.emplace_back();
    for (int h = 0; h < kKvHeads; ++h) {
      auto tokens = step->Selection(0, groups == 1 ? 0 : h, KVS_TOKENS);
      KVS_MUST(tokens);
      a.attended.back().push_back(*tokens);
    }
  }
  KVS_MUST(step->End());
  return a;
}

// Holds the step's last token to the oracle over what the step says it attended.
inline void ExpectOracle(const Answer& a, uint64_t seed, int32_t first, int n) {
  ASSERT_EQ(a.out.size(), static_cast<size_t>(kLayers));
  const int32_t position = first + n - 1;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int h = 0; h < kQueryHeads; ++h) {
      std::vector<int32_t> attended = a.attended[layer][h / kGroup];
      while (!attended.empty() && attended.back() >= first) attended.pop_back();
      for (int32_t t = first; t <= position; ++t) attended.push_back(t);  // the chunk, causally
      const auto want = Oracle(seed, position, layer, h, attended);
      const size_t row = static_cast<size_t>(n - 1) * kQueryHeads + h;
      for (int c = 0; c < kDim; ++c) {
        ASSERT_NEAR(a.out[layer][row * kDim + c], want[c], 2e-5)
            << "layer " << layer << " head " << h << " position " << position;
      }
      ASSERT_NEAR(a.lse[layer][row], want[kDim], 2e-5);
    }
  }
}

}  // namespace kvstrata::client::testing
