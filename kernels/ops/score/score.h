// SPDX-License-Identifier: Apache-2.0
// Op score: queries against the summary rows of units.
//
//   kMinMax  out[u] = max over the g queries of sum_c max(q_c * min_c[u], q_c * max_c[u])   (Quest)
//   kDeviation  out[u] = max over the g queries of
//                     sum_c q_c * mean_c[u] + 2 sqrt(sum_c q_c^2 variance_c[u])
//                     (docs/spec/beyond.md 10)
//   kDot     out[u] (+)= max over the g queries of sum_c q_c * row_c[u]
//            `accumulate` adds into out[u]: CHESS's dot product over all layers and heads is a
//            sequence of calls with one query, in order of (layer, head) (docs/spec/chess.md 3)
//
// Plain dot products, unscaled (docs/spec/README.md). Sums in fp32 (ref: double). Rows of one
// (layer, head) are `count` runs: blocks[first/per_block] + offset + (u % per_block) * row_stride.
// Work items are independent. Cost: reads each row once. No allocation.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

struct ScoreWork {
  enum class Kind : uint8_t { kMinMax, kDeviation, kDot };
  Kind kind = Kind::kDot;
  const float* q = nullptr;   // [queries][dim]
  int32_t queries = 1;        // the G heads that share these rows
  PagedRows rows;             // unit rows dressed as pages: kMinMax the minima, else the means
  int64_t second_offset = 0;  // bytes from a minimum to its maximum, from a mean to its variance
  Run units;                  // which units
  float* out = nullptr;       // [units.end - units.begin]
  bool accumulate = false;    // kDot only
};

void ScoreRef(const ScoreWork* work, int64_t n, Executor& executor);
void ScoreSimd(const ScoreWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
