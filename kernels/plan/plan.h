// SPDX-License-Identifier: Apache-2.0
// Plan: one choice on each axis (docs/plans.md, "Axes") and their options.
//
// Text form, one line, the same in the C ABI, the CLI and the configuration:
//     quest                                    a preset with its defaults
//     quest{budget = 1024, page = 16}          a preset with options (a TOML inline table)
//     {selector = "cascade", rho = [0.5, 0.2, 0.1]}      a plan of one's own
// Named plans of the daemon's configuration ([plans.NAME]) are resolved by the daemon before this.
//
// Presets: `full`, and those of kernels/plans/plan_list.h. Other names answer INVALID_ARGUMENT with
// the nearest known one ("did you mean"). A combination that cannot work is refused here, with the
// reason.
//
// Defaults are those of docs/spec; each option says its source. A new one is declared, and gets its
// row of the table (plan_rows.h), in the files of what reads it. Values; thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/index_options.h"
#include "kernels/plan/plan_kinds.h"
#include "kernels/plan/stored_options.h"

namespace kvstrata {

// min_tokens = "auto".
inline constexpr int32_t kAutoTokens = -1;
// The largest min_tokens: longer than any sequence. Three of these still add up below 2^31, so that
// no sum of lengths overflows.
inline constexpr int32_t kMostMinTokens = 1 << 29;

struct Plan {
  std::string name = "full";  // the preset's name; "custom" for a plan of one's own
  SelectorKind selector = SelectorKind::kFull;
  CodecKind codec = CodecKind::kRaw;
  Tier tier = Tier::kDevice;  // where pages are taken first

  // Common to all plans (docs/spec/README.md). min_tokens: below it a sequence is attended in full;
  // kAutoTokens only until the sequence is opened (step/break_even.h).
  int32_t min_tokens = 4096;
  int32_t batch = 1;           // for min_tokens = "auto": sequences that are decoded together
  int32_t n_dense_layers = 0;  // the first layers are attended in full
  // Attended rows stand at 0 .. r - 1, the query at r - 1, instead of at their positions: of models
  // whose keys are stored before rotary embedding (docs/spec/README.md; TokenSelect, length
  // extrapolation). Codec raw.
  bool compact = false;

  // Declared beside what reads them; those of other selectors, codecs and segmenters than the
  // plan's have their defaults. One word for one thing: `sinks` and `recent` are always attended,
  // `budget` is what is chosen beside them, `index.unit` is what the index keeps together.
  IndexOptions index;
#define KVS_PLAN_OPTIONS(preset, Kind, name, built) Kind##Options name;
#define KVS_CODEC_OPTIONS(Kind, name, built) Kind##Options name;
  KVS_PLANS(KVS_PLAN_OPTIONS)
  KVS_CODECS(KVS_CODEC_OPTIONS)
  StoredOptions stored;  // for all codecs but raw

  // What selector and codec need; no choice of its own. REQUIRES: they go together.
  SegmenterKind segmenter() const;

  bool operator==(const Plan&) const = default;
};

// Parses the text form. Errors: PLAN_UNKNOWN, PLAN_OPTION_UNKNOWN, PLAN_OPTION_INVALID,
// PLAN_COMBINATION, PLAN_SYNTAX, all INVALID_ARGUMENT; UNIMPLEMENTED PLAN_UNIMPLEMENTED, where this
// build leaves the plan out.
Result<Plan> ParsePlan(std::string_view text);

// Whether a plan can serve a model; ParsePlan does not know it. PLAN_COMBINATION, or
// PLAN_UNIMPLEMENTED (keys before rotary embedding under a codec), when a sequence is opened.
Status CheckGeometry(const Plan& plan, const Geometry& geometry);

// The text of a plan with every option that its axes read (but max_missed where it is 0), so that
// Parse(Format(p)) == p.
std::string FormatPlan(const Plan& plan);

// Names of all presets of this build, in the order in which tables show them.
std::span<const std::string_view> PresetNames();

// One line on a preset for `kvstrata plan ls`.
std::string_view DescribePreset(std::string_view name);

// The index that the plan's segmenter keeps beside the pages; kind kNone for full and window.
IndexLayout IndexOf(const Plan& plan, const Geometry& geometry);

// The memory of that index over that of keys and values in 16 bits, whatever the model; 0 without
// an index.
double IndexShare(const Plan& plan);

}  // namespace kvstrata
