// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/sentence_queries.h"

namespace kvstrata {

std::vector<Run> SentenceQueries::Close(std::span<const uint8_t> boundary, int32_t tokens) {
  std::vector<Run> complete = ends_.Close(boundary, tokens);
  if (complete.empty()) return complete;
  for (Layer& layer : layers_) {
    layer.sum.clear();
    layer.count = 0;
  }
  return complete;
}

void SentenceQueries::Mean(int layer, int32_t at, const float* q, int32_t group, float* out) {
  Layer& own = layers_[layer];
  own.next_at = at;
  const size_t size = static_cast<size_t>(geometry_.query_heads) * geometry_.head_dim;
  own.next.assign(q, q + size);
  const double queries = static_cast<double>(group) * (own.count + 1);
  const int32_t dim = geometry_.head_dim;
  for (int32_t row = 0; row < geometry_.query_heads / group; ++row) {
    for (int32_t c = 0; c < dim; ++c) {
      double sum = 0;
      for (int32_t h = row * group; h < (row + 1) * group; ++h) {
        const size_t i = static_cast<size_t>(h) * dim + c;
        sum += (own.count > 0 ? own.sum[i] : 0.0) + q[i];
      }
      out[int64_t{row} * dim + c] = static_cast<float>(sum / queries);
    }
  }
}

void SentenceQueries::Advance() {
  for (Layer& layer : layers_) {
    if (layer.next.empty()) continue;
    layer.sum.resize(layer.next.size());
    for (size_t i = 0; i < layer.next.size(); ++i) layer.sum[i] += layer.next[i];
    ++layer.count;
    layer.newest = layer.next_at;
    layer.next.clear();
  }
}

void SentenceQueries::Truncate(int32_t tokens) {
  ends_.Truncate(tokens);
  Forget();
  for (Layer& layer : layers_) {
    if (layer.newest < tokens) continue;
    layer.sum.clear();
    layer.count = 0;
  }
}

void SentenceQueries::Forget() {
  for (Layer& layer : layers_) layer.next.clear();
}

}  // namespace kvstrata
