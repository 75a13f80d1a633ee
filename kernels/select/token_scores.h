// SPDX-License-Identifier: Apache-2.0
// Scores of tokens by the queries of a step, wherever their keys lie: where a codec holds them, or
// on their pages. Private to selectors.
//
// Threads: one call at a time for an object. Deterministic: work is cut by fixed lengths.
#pragma once

#include <cstdint>

#include "kernels/rows/score_works.h"
#include "kernels/select/selector.h"

namespace kvstrata {

class TokenScores {
 public:
  // out [(kv head - heads.begin) * group + g][t - range.begin], rows `stride` floats apart: scale *
  // q.k of the tokens of `range`, for the KV heads `heads`. q [query_heads][head_dim].
  // Cost: reads each key once for all queries of its KV head.
  void Score(const SelectContext& context, int layer, const float* q, Run heads, Run range,
             float scale, float* out, int64_t stride);

 private:
  ScoreWorks works_;
};

// Keys of the positions of `range`, all heads of one layer, in the form that holds them.
int64_t KeyBytes(const SelectContext& context, int layer, Run range);

}  // namespace kvstrata
