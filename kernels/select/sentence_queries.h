// SPDX-License-Identifier: Apache-2.0
// The query cache of SentenceKV (docs/spec/sentencekv.md 5): per layer the sum of the queries of
// the sentence that is being generated. Private to selectors.
//
// Threads: one call at a time. Memory: layers * query_heads * head_dim doubles, and as many floats
// while a step is open.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/pages/page_view.h"
#include "kernels/select/sentence_ends.h"

namespace kvstrata {

class SentenceQueries {
 public:
  SentenceQueries(const Geometry& geometry, int32_t max_length)
      : geometry_(geometry), ends_(max_length), layers_(geometry.layers) {}

  // The prompt is complete: a sentence begins behind it.
  void Start(int32_t prompt_tokens) { ends_.Start(prompt_tokens); }

  // Where the sentence begins that is being generated.
  int32_t begin() const { return ends_.begin(); }

  // The sentences that are complete at `tokens`; the cache is emptied if there are any. A boundary
  // that is reported late ends its sentence late, and takes the queries since with it.
  std::vector<Run> Close(std::span<const uint8_t> boundary, int32_t tokens);

  // Remembers q [query_heads][head_dim] of position `at` as that of the open step, and writes the
  // mean over the sentence's queries, q included, and over each `group` heads that follow each
  // other: out [query_heads / group][head_dim].
  void Mean(int layer, int32_t at, const float* q, int32_t group, float* out);

  // The open step's queries join the sentence.
  void Advance();
  // Tokens from `tokens` on are taken back; with a query among them all of the sentence's go.
  void Truncate(int32_t tokens);
  // A step that never ended did not happen.
  void Forget();

 private:
  struct Layer {
    std::vector<double> sum;  // [query_heads][head_dim]; empty: none yet
    int32_t count = 0;
    int32_t newest = -1;      // position of the last one
    std::vector<float> next;  // query of the open step; empty: none
    int32_t next_at = -1;
  };

  Geometry geometry_;
  SentenceEnds ends_;
  std::vector<Layer> layers_;
};

}  // namespace kvstrata
