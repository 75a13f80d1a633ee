// SPDX-License-Identifier: Apache-2.0
// Spans: the runs between tokens that surprised the model (docs/spec/sekv.md 1, 2). Pure functions
// of the surprisal in nats, by position; all sums in fp64.
//
// H_0 is 0 whatever was reported for position 0, and position 0 is an anchor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/pages/page_view.h"

namespace kvstrata {

// Whether there is a surprisal for all of `range`; position 0 needs none.
bool HasSurprisal(std::span<const float> surprisal, Run range);

// H_t of one position. REQUIRES: HasSurprisal.
double SurprisalAt(std::span<const float> surprisal, int32_t t);

// Nats that the surprisal of an anchor exceeds: mean + alpha * population deviation over the
// prompt, and 1e-6 more, so that equal surprisals make no anchors. REQUIRES: prompt > 0,
// HasSurprisal.
double AnchorThreshold(std::span<const float> surprisal, int32_t prompt, double alpha);

// Anchors in `range`, ascending.
std::vector<int32_t> AnchorsIn(std::span<const float> surprisal, Run range, double threshold);

// Maximal runs of `range` without anchors, of at least max(l_min, 1) tokens. For a prompt: `range`
// without its local window.
std::vector<Run> SpansIn(std::span<const float> surprisal, Run range, double threshold,
                         int32_t l_min);

// Positions of `range` in none of `spans` (ascending, disjoint, inside the range).
std::vector<int32_t> PositionsBetween(Run range, std::span<const Run> spans);

}  // namespace kvstrata
