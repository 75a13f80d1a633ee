// SPDX-License-Identifier: Apache-2.0
// Affinity of CHESS (docs/spec/chess.md 2 and 3): the anchor, which is the mean page vector of the
// recent window, or a query, against every page, chunk and grid of a hierarchy index. Private to
// chess.
//
// Units that are still filling have no stored row; their vectors are made here and thrown away.
// Threads: pure; any. Cost: reads every index row of `layers` below `tokens` once; one scratch
// array of (units * layers * KV heads) floats.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/select/selector.h"

namespace kvstrata {

// By level of the index: 0 pages (complete ones), 1 chunks, 2 grids (the last may be filling).
using AffinityScores = std::array<std::vector<float>, 3>;

// What is scored, and what shares a list of pages.
struct AffinityRequest {
  int32_t tokens = 0;        // the sequence as it was then, later tokens unseen
  int32_t window_start = 0;  // page; the window reaches from it on, the filling one included
  // Both sides of the dot product minus the mean vector of the complete pages (fp32, unrounded), so
  // that channels that are large everywhere do not decide (docs/spec/beyond.md 7); it reads the
  // page rows once more.
  bool centred = false;
  CascadeOptions::Lists lists = CascadeOptions::Lists::kModel;
  Run layers;                // whose rows are scored
  const float* q = nullptr;  // [query_heads][head_dim] of the one layer in `layers`, in place of
                             // the window's mean: of each KV head the largest of its group's
};

// Scores of each list: one, one a layer, or one a layer and KV head; sums over what shares it.
// REQUIRES: at least one page is complete at `tokens`; tokens <= context.view.tokens; all rows of
// units that are complete at `tokens` are written; window_start <= tokens / page; with q one layer.
std::vector<AffinityScores> ScoreAffinity(const SelectContext& context,
                                          const AffinityRequest& request);

}  // namespace kvstrata
