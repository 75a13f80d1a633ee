// SPDX-License-Identifier: Apache-2.0
// FixedSelection: what a selector attends whose choice follows from the plan and the sequence's
// length alone, whatever the queries are. One such function is the selector on both machines: of it
// FixedSelector makes the CPU's Selector, and kernels/step/gpu/lists/cuda_fixed.cc the GPU's
// CudaSelector.
//
// Pure; any thread. Cost: proportional to the units listed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/select/selection_rule.h"
#include "kernels/select/selector.h"

namespace kvstrata {

// Positions [0, sink_end), whole units that lie behind them, ascending, and [recent_begin, n).
struct FixedChoice {
  int32_t sink_end = 0;
  std::vector<int32_t> units;
  int32_t recent_begin = 0;

  bool everything() const { return sink_end == recent_begin && units.empty(); }
};

struct FixedSelection {
  // Chooses among n tokens, the query's own included, which every choice has.
  FixedChoice (*choose)(const Plan& plan, int32_t n);
  SelectionRule (*rule)(const Plan& plan, int32_t tokens);
  int32_t unit_tokens = 0;  // tokens of a unit that it lists; 0: it lists none
};

// What is chosen, as a Selection; one list for all heads.
void SelectFixed(const FixedSelection& fixed, const Plan& plan, int32_t n, Selection* out);

// `fixed` outlives it.
std::unique_ptr<Selector> NewFixedSelector(const FixedSelection& fixed, const Plan& plan);

}  // namespace kvstrata
