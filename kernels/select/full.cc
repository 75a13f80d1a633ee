// SPDX-License-Identifier: Apache-2.0
// Selector `full`: everything, always.
#include "kernels/plan/plan_axes.h"
#include "kernels/select/selector_rows.h"

namespace kvstrata {
namespace {

FixedChoice Everything(const Plan&, int32_t) { return {}; }

SelectionRule Rule(const Plan&, int32_t tokens) {
  SelectionRule rule;
  rule.rows = tokens;
  return rule;
}

constexpr FixedSelection kFull = {Everything, Rule};

}  // namespace

constinit const Preset kFullPreset = {
    .description = "every token, every step: the baseline that the others are measured against",
    .codecs = kWithoutSummaries};
constinit const SelectorRow kFullSelector = FixedRow<kFull>(NeedsNothing);

}  // namespace kvstrata
