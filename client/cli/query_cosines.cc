// SPDX-License-Identifier: Apache-2.0
#include "client/cli/query_cosines.h"

#include <algorithm>
#include <map>
#include <span>

namespace kvstrata::cli {
namespace {

// The decode queries of one layer of one trace.
class Queries {
 public:
  Queries(const TraceShape& shape, const TraceLayer& layer)
      : shape_(shape), first_(layer.q + shape.tail * shape.q_row()) {}

  double Flattened(int32_t a, int32_t b) const {
    const auto n = static_cast<size_t>(shape_.q_row());
    return Cosine({Row(a), n}, {Row(b), n});
  }
  double Smallest(int32_t a, int32_t b) const {
    const auto d = static_cast<size_t>(shape_.head_dim);
    double least = 1;
    for (int64_t h = 0; h < shape_.query_heads; ++h) {
      const int64_t at = h * shape_.head_dim;
      least = std::min(least, Cosine({Row(a) + at, d}, {Row(b) + at, d}));
    }
    return least;
  }

 private:
  const uint16_t* Row(int32_t t) const { return first_ + t * shape_.q_row(); }

  const TraceShape& shape_;
  const uint16_t* first_;
};

// How many of the steps reuse the selection of an earlier one.
template <typename Likeness>
int64_t Hits(int32_t steps, double theta, Likeness cosine) {
  int64_t hits = 0;
  int32_t selected = 0;
  for (int32_t t = 1; t < steps; ++t) {
    if (cosine(t, selected) >= theta) {
      ++hits;
    } else {
      selected = t;
    }
  }
  return hits;
}

struct Tally {
  std::map<int32_t, LayerCosines> layers;
  std::array<int64_t, kThetas.size()> flattened{}, per_head{};
  int64_t layer_steps = 0;
};

void AddLayer(const TraceShape& shape, const TraceLayer& layer, Tally* tally) {
  const Queries queries(shape, layer);
  LayerCosines& cosines = tally->layers[layer.layer];
  cosines.layer = layer.layer;
  for (int32_t t = 1; t < shape.steps; ++t) {
    cosines.flattened.Add(queries.Flattened(t, t - 1));
    cosines.smallest.Add(queries.Smallest(t, t - 1));
  }
  for (size_t i = 0; i < kThetas.size(); ++i) {
    tally->flattened[i] += Hits(shape.steps, kThetas[i],
                                [&](int32_t a, int32_t b) { return queries.Flattened(a, b); });
    tally->per_head[i] +=
        Hits(shape.steps, kThetas[i], [&](int32_t a, int32_t b) { return queries.Smallest(a, b); });
  }
  tally->layer_steps += shape.steps;
}

}  // namespace

QueryCosines MeasureQueryCosines(const std::vector<Trace>& traces) {
  QueryCosines out;
  Tally tally;
  for (const Trace& trace : traces) {
    if (trace.shape().steps < 2) continue;
    out.steps += trace.shape().steps;
    for (const TraceLayer& layer : trace.layers()) AddLayer(trace.shape(), layer, &tally);
  }
  if (tally.layer_steps == 0) {
    out.status = "not in the trace: two decode steps or more";
    return out;
  }
  for (auto& [number, cosines] : tally.layers) out.layers.push_back(std::move(cosines));
  const auto share = [&](int64_t hits) {
    return static_cast<double>(hits) / static_cast<double>(tally.layer_steps);
  };
  for (size_t i = 0; i < kThetas.size(); ++i) {
    out.hit_rates.push_back({kThetas[i], share(tally.flattened[i]), share(tally.per_head[i])});
  }
  return out;
}

}  // namespace kvstrata::cli
