// SPDX-License-Identifier: Apache-2.0
// Axes of a plan: their names, and which selector and codec go together, with the one segmenter
// that they need. ParsePlan, its refusals and docs/plans.md go by what each plan's folder says here
// (plans/plan_list.h). Private to kernels/plan/plan*.cc and to the files of presets.
//
// Threads: constant tables and pure functions; any.
#pragma once

#include <array>
#include <optional>
#include <span>
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

// A codec that a selector works over, and the one segmenter that they need.
struct Combination {
  CodecKind codec;
  SegmenterKind segmenter;
  std::string_view because;  // why no other segmenter
};
inline constexpr std::string_view kNoSummaries =
    "it reads no summaries, so an index would cost memory and serve nothing";
inline constexpr std::string_view kSpansOnly =
    "codec 'lowrank' stores the spans of segmenter 'span'";
// What a selector works over that reads rows by position, however they are held.
constexpr std::array<Combination, 2> OverRawAndPacked(SegmenterKind segmenter,
                                                      std::string_view because) {
  return {{{CodecKind::kRaw, segmenter, because}, {CodecKind::kPacked, segmenter, because}}};
}
inline constexpr auto kWithoutSummaries = OverRawAndPacked(SegmenterKind::kNone, kNoSummaries);

// A named plan: a selector in its own combination, with its defaults.
struct Preset {
  std::string_view description;
  OptionTable options = {};  // the selector's
  // Its own first; if it does not say, codec raw alone.
  std::span<const Combination> codecs = std::span(kWithoutSummaries).first(1);
  std::string_view why_no_other = {};  // codec; "" the codec says why
  int32_t unit = IndexOptions().unit;  // default of `index.unit`
};
extern const Preset kFullPreset;  // select/full.cc
#define KVS_PRESET(preset, Kind, name, built) extern const Preset k##Kind##Preset;
KVS_PLANS(KVS_PRESET)

// One of each selector by SelectorKind; also the order in which tables show them.
struct PresetRow {
  std::string_view name;
  SelectorKind selector;
  std::string_view selector_name;
  const Preset* preset;       // null: not in this build
  std::string_view left_out;  // the option of CMake that leaves it out
};
std::span<const PresetRow> PresetRows();

// One of each codec by CodecKind.
struct CodecNameRow {
  std::string_view name;
  const OptionTable* options;  // null: not in this build
  std::string_view left_out;   // as PresetRow's
};
std::span<const CodecNameRow> CodecNameRows();

// What was written of the axes; nothing: to be chosen. A segmenter only says which codec is meant
// where none is written.
struct AxisChoice {
  SelectorKind selector = SelectorKind::kFull;
  std::optional<CodecKind> codec;
  std::optional<SegmenterKind> segmenter;
};

// The combination that a choice asks for, the selector's own preset before others.
// PLAN_COMBINATION says why there is none; PLAN_UNIMPLEMENTED, that this build leaves it out.
Result<const Combination*> Combine(const AxisChoice& choice);

// The plan of a combination with its defaults (docs/spec), named after the selector's own preset.
Plan DefaultsOf(SelectorKind selector, const Combination& combination);

}  // namespace kvstrata
