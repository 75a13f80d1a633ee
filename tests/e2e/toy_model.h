// SPDX-License-Identifier: Apache-2.0
// ToyModel: a deterministic "language model" for end-to-end tests. Keys, values and queries are
// functions of (token id, position, layer), so any process can recompute what a sequence must hold
// and what full attention over it must answer, in double precision, without kvstrata.
#pragma once

#include <kvstrata/kvstrata.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/fakes/model_desc.h"

namespace kvstrata::testing {

struct ToyModel {
  int layers = 2, query_heads = 4, kv_heads = 2, dim = 64, page = 16;
  std::string digest = "toy";

  kvs_model_desc Desc() const {
    return DescOf({layers, query_heads, kv_heads, dim, page, KVS_F32}, "toy", digest.c_str());
  }

  // A number in [-1, 1) that depends on everything given (splitmix64).
  static float Noise(uint64_t token, uint64_t position, uint64_t where) {
    uint64_t x = token * 0x9E3779B97F4A7C15u + position * 0xBF58476D1CE4E5B9u + where;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return static_cast<float>(static_cast<int64_t>(x) >> 40) / 8388608.0f;
  }
  enum Kind { kKey = 1, kValue = 2, kQuery = 3 };
  float Element(Kind kind, int layer, int32_t token, uint32_t position, int head, int c) const {
    const uint64_t where = ((uint64_t{kind} * 64 + layer) * 64 + head) * 512 + c;
    return Noise(static_cast<uint64_t>(token), position, where) * (kind == kQuery ? 2.0f : 1.0f);
  }
  // [tokens][heads][dim] of ids at positions first, first + 1, ...
  std::vector<float> Rows(Kind kind, int layer, const std::vector<int32_t>& ids,
                          uint32_t first) const {
    const int heads = kind == kQuery ? query_heads : kv_heads;
    std::vector<float> rows;
    rows.reserve(ids.size() * heads * dim);
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int h = 0; h < heads; ++h) {
        for (int c = 0; c < dim; ++c) {
          rows.push_back(Element(kind, layer, ids[i], first + i, h, c));
        }
      }
    }
    return rows;
  }

  // Full attention of the last of `ids` over all of them: [query_heads][dim].
  std::vector<float> Expected(int layer, const std::vector<int32_t>& ids) const {
    const uint32_t n = ids.size();
    std::vector<float> out;
    for (int h = 0; h < query_heads; ++h) {
      const int kv = h / (query_heads / kv_heads);
      std::vector<double> p(n);
      double top = -1e300, sum = 0;
      for (uint32_t t = 0; t < n; ++t) {
        double s = 0;
        for (int c = 0; c < dim; ++c) {
          s += double{Element(kQuery, layer, ids[n - 1], n - 1, h, c)} *
               Element(kKey, layer, ids[t], t, kv, c);
        }
        p[t] = s / std::sqrt(double(dim));
        top = std::max(top, p[t]);
      }
      for (double& x : p) sum += x = std::exp(x - top);
      for (int c = 0; c < dim; ++c) {
        double o = 0;
        for (uint32_t t = 0; t < n; ++t) o += p[t] / sum * Element(kValue, layer, ids[t], t, kv, c);
        out.push_back(static_cast<float>(o));
      }
    }
    return out;
  }
};

inline kvs_tensor TensorOf(const std::vector<float>& x, int heads, int dim) {
  return {x.data(), KVS_F32, heads, dim, static_cast<int32_t>(x.size() / heads / dim), 0, 0};
}

}  // namespace kvstrata::testing
