// SPDX-License-Identifier: Apache-2.0
// Selector `full`: everything, always.
#include "kernels/select/selector_rows.h"

namespace kvstrata {
namespace {

FixedChoice Everything(const Plan&, int32_t) { return {}; }

SelectionRule Rule(const Plan&, int32_t tokens) {
  SelectionRule rule;
  rule.rows = tokens;
  return rule;
}

}  // namespace

constinit const FixedSelection kFullSelection = {"full", Everything, Rule};

}  // namespace kvstrata
