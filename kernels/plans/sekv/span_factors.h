// SPDX-License-Identifier: Apache-2.0
// One span of one (layer, KV head): its coarse row, and its keys and values as gated low-rank
// factors or raw, whichever is smaller (docs/spec/sekv.md 3 to 5), but raw where |X - X^|_F / |X|_F
// of the factors exceeds the plan's max_loss. Private to sekv.
//
// Threads: pure. Allocates scratch of the span's size.
#pragma once

#include <span>
#include <vector>

#include "kernels/plans/sekv/span_parameters.h"

namespace kvstrata {

// A and B as lowrank_layout.h lays them out, or the rows; in bf16.
struct FactorRows {
  int32_t rank = -1;
  bool refused = false;     // factors would be smaller, and lose more than max_loss
  std::vector<BF16> left;   // [n][rank], or [n][dim]
  std::vector<BF16> right;  // [rank][dim], or empty
};

struct SpanForm {
  std::vector<BF16> k_mean, v_mean;  // [dim]
  FactorRows keys, values;
};

struct SpanSource {
  PagedRows keys, values;
  Run tokens;
  std::span<const float> surprisal;  // by position
};

// Factors a span with the plan's r_max and max_loss. Gates are 1 where `parameters` is null.
SpanForm CompressSpan(const SpanSource& source, const Plan& plan, const SpanParameters* parameters,
                      const Backend& backend);

}  // namespace kvstrata
