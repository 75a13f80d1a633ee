// SPDX-License-Identifier: Apache-2.0
// The observation window of SentenceKV (docs/spec/sentencekv.md 2): the prompt's last queries, and
// the attention that they pay to the tokens before them. Private to sentencekv.
//
// Threads: one call at a time for an object.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/select/selector.h"

namespace kvstrata {

// Which of a layer's queries a ring of the last `capacity` ones holds: those of [begin, end).
struct ObservedRange {
  int32_t begin = 0, end = 0;

  // The queries of [first, first + count) are added; a gap before `first` forgets what was before.
  void Add(int32_t first, int32_t count, int32_t capacity);
  // Whether they are the last min(capacity, tokens) of a prompt of `tokens`.
  bool Cover(int32_t tokens, int32_t capacity) const;
};

// The last queries of each layer. Memory: layers * count * query_heads * head_dim floats.
class ObservedQueries {
 public:
  ObservedQueries(const Geometry& geometry, int32_t count)
      : geometry_(geometry), capacity_(count), layers_(geometry.layers) {}

  // As Selector::Observe; a gap before `first` forgets what was before it.
  void Add(int layer, const float* q, int64_t q_token, int32_t first, int32_t count);

  // Whether they are the last min(count, tokens) of a prompt of `tokens`.
  bool Cover(int layer, int32_t tokens) const;

  // [min(count, tokens)][query_heads][head_dim], in order of position. REQUIRES: Cover.
  std::vector<float> Queries(int layer, int32_t tokens) const;

 private:
  struct Layer {
    std::vector<float> rows;  // a ring: position t at t % capacity
    ObservedRange held;
  };
  int64_t RowFloats() const { return int64_t{geometry_.query_heads} * geometry_.head_dim; }

  Geometry geometry_;
  int32_t capacity_;
  std::vector<Layer> layers_;
};

// Attention that the last `window` queries q [window][query_heads][head_dim] of a prompt of
// `tokens` pay, each causally, to the tokens before the window; summed over the window and the G
// heads of a KV head, or per query head. [rows][tokens - window], rows = kv_heads or query_heads.
// Cost: window * group dot products a key; the keys are read once for about 8M scores.
std::vector<float> TokenImportance(const SelectContext& context, int layer, const float* q,
                                   int32_t window, int32_t tokens, bool per_query_head);

}  // namespace kvstrata
