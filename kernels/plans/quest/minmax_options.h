// SPDX-License-Identifier: Apache-2.0
// Options of selector `minmax` (Quest), in tokens. Rows: minmax.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct MinMaxOptions {
  // `n_sink`, `n_recent`: always attended, rounded outwards to whole units.
  int32_t sinks = 0, recent = 1;
  int32_t budget = 2048;
  // `group = "softmax"`: heads' unit scores normalised, then summed (docs/spec/beyond.md 3).
  bool group_softmax = false;
  // `score = "deviation"`: by mean and deviation of a page's logits, not by its bounds (10 there).
  bool deviation = false;

  bool operator==(const MinMaxOptions&) const = default;
};

}  // namespace kvstrata
