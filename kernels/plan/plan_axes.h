// SPDX-License-Identifier: Apache-2.0
// Axes of a plan: their names, and which selector and codec go together, with the one segmenter
// that they need. One table, by which ParsePlan, its refusals and docs/plans.md go. Private to
// kernels/plan/plan*.cc.
//
// Threads: constant tables and pure functions; any.
#ifndef KVSTRATA_KERNELS_PLAN_PLAN_AXES_H_
#define KVSTRATA_KERNELS_PLAN_PLAN_AXES_H_

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/plan/plan.h"
#include "kernels/plan/plan_options.h"

namespace kvstrata {

using Names = std::span<const std::string_view>;

// One axis that a plan's text may name, and its values by enumerator.
struct PlanAxis {
  std::string_view option;
  Names known;
};
extern const PlanAxis kSelectorAxis, kCodecAxis, kSegmenterAxis;

// A named plan: a selector in its own combination, with its defaults.
struct PresetRow {
  std::string_view name;
  SelectorKind selector;
  std::string_view selector_name;
  const OptionTable* options;  // the selector's; null: not in this build
  std::string_view description;
};
// One of each selector by SelectorKind; also the order in which tables show them.
std::span<const PresetRow> PresetRows();

// What was written of the axes; nothing: to be chosen. A segmenter only says which codec is meant
// where none is written.
struct AxisChoice {
  SelectorKind selector = SelectorKind::kFull;
  std::optional<CodecKind> codec;
  std::optional<SegmenterKind> segmenter;
};

struct Combination {
  SelectorKind selector;
  CodecKind codec;
  SegmenterKind segmenter;
  std::string_view because;  // why no other segmenter
};

// The combination that a choice asks for, the selector's own preset before others.
// PLAN_COMBINATION says why there is none; PLAN_UNIMPLEMENTED, that this build leaves it out.
Result<const Combination*> Combine(const AxisChoice& choice);

// The plan of a combination with its defaults (docs/spec), named after the selector's own preset.
Plan DefaultsOf(const Combination& combination);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLAN_PLAN_AXES_H_
