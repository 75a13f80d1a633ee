// SPDX-License-Identifier: Apache-2.0
// Options of selector `cascade` (docs/spec/chess.md). Rows: cascade.cc.
#pragma once

#include <array>
#include <cstdint>

namespace kvstrata {

struct CascadeOptions {
  enum class Pruning : uint8_t { kTop, kLiteral };
  enum class Trigger : uint8_t { kEntropy, kEvery, kAlways };
  enum class Lists : uint8_t { kModel, kLayer, kHead };  // what shares a list; kHead: KV heads

  Lists lists = Lists::kModel;
  bool by_query = false;                        // `anchor = "query"`: the step's, not the window
  int32_t sinks = 1, recent = 16;               // pages; recent: `window`
  std::array<double, 3> rho = {0.5, 0.2, 0.1};  // shares of grids, chunks, pages ("aggressive")
  Pruning pruning = Pruning::kTop;              // `cascade`
  Trigger trigger = Trigger::kEntropy;
  bool trigger_or = false;  // `combine = "or"`: one threshold suffices
  // Mean and variance of a page's entropies, nats. Infinite: not calibrated, the entropy trigger
  // never fires and pages without entropies count towards `every`.
  std::array<double, 2> thresholds = {1.0 / 0.0, 1.0 / 0.0};
  int32_t every = 10;    // completed pages
  bool centred = false;  // minus the mean page vector before dot products (docs/spec/beyond.md 7)
  bool tree = false;  // unselected grids, chunks and pages as one row each (docs/spec/beyond.md 2)

  bool operator==(const CascadeOptions&) const = default;
};

}  // namespace kvstrata
