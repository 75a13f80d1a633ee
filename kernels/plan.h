// Plan: one choice on each axis (DESIGN, "four independent choices") and their options.
//
// Text form, one line, the same in the C ABI, the CLI and the configuration:
//     quest                                    a preset with its defaults
//     quest{budget = 1024, page = 16}          a preset with options (a TOML inline table)
//     {segmenter = "hierarchy", selector = "cascade", rho = [0.5, 0.2, 0.1]}      a plan of one's own
// Named plans of the daemon's configuration ([plans.NAME]) are resolved by the daemon before this.
//
// Presets: full, window, quest, chess. Names that the design knows and this build has not
// (tokenselect, sentencekv, sekv, mosaickv, strata; their segmenters, selectors and codecs) answer
// UNIMPLEMENTED; other names INVALID_ARGUMENT with the nearest known one ("did you mean"). A
// combination that cannot work is refused here, with the reason.
//
// Defaults are those of spec/*.md; each option says its source. Values; thread-safe.
#ifndef KVSTRATA_KERNELS_PLAN_H_
#define KVSTRATA_KERNELS_PLAN_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "kernels/page_view.h"

namespace kvstrata {

enum class SegmenterKind : uint8_t { kNone, kPage, kHierarchy };
enum class SelectorKind : uint8_t { kFull, kWindow, kMinMax, kCascade };
enum class CodecKind : uint8_t { kRaw };
enum class TierKind : uint8_t { kDevice, kHost };

std::string_view NameOf(SegmenterKind k);
std::string_view NameOf(SelectorKind k);
std::string_view NameOf(CodecKind k);
std::string_view NameOf(TierKind k);

struct Plan {
  std::string name = "full";  // the preset's name; "custom" for a plan of one's own
  SegmenterKind segmenter = SegmenterKind::kNone;
  SelectorKind selector = SelectorKind::kFull;
  CodecKind codec = CodecKind::kRaw;
  TierKind tier = TierKind::kDevice;  // where pages are taken first

  // Common to all plans (spec/common.md).
  int32_t min_tokens = 4096;     // below it a sequence is attended in full
  int32_t n_dense_layers = 0;    // the first layers are attended in full

  // Always-on sets in tokens. window: 4 + 2044 (StreamingLLM); quest: 0 + 1, rounded outwards to
  // whole pages; chess counts in pages: see `sinks` and `window`.
  int32_t n_sink = 0;
  int32_t n_recent = 0;

  int32_t page = 16;             // tokens of a unit; quest 16, chess 32 (paper)
  int32_t budget = 2048;         // quest: tokens

  // chess (spec/chess.md)
  int32_t pages_per_chunk = 8, chunks_per_grid = 8;
  int32_t sinks = 1, window = 16;                    // pages
  std::array<double, 3> rho = {0.5, 0.2, 0.1};       // shares of grids, chunks, pages ("aggressive")
  enum class Cascade : uint8_t { kTop, kLiteral } cascade = Cascade::kTop;
  enum class Trigger : uint8_t { kEntropy, kEvery, kAlways } trigger = Trigger::kEntropy;
  bool trigger_or = false;                           // `combine = "or"`: one threshold suffices
  // `thresholds`: mean and variance of a page's entropies, nats. Infinite: not calibrated, the
  // entropy trigger never fires and pages without entropies count towards `every`.
  std::array<double, 2> thresholds = {1.0 / 0.0, 1.0 / 0.0};
  int32_t every = 10;                                // completed pages

  bool operator==(const Plan&) const = default;
};

// Parses the text form. Errors: PLAN_UNKNOWN, PLAN_OPTION_UNKNOWN, PLAN_OPTION_INVALID,
// PLAN_COMBINATION (all INVALID_ARGUMENT), PLAN_UNIMPLEMENTED (UNIMPLEMENTED), PLAN_SYNTAX.
Result<Plan> ParsePlan(std::string_view text);

// The text of a plan with every option that its axes read, so that Parse(Format(p)) == p.
std::string FormatPlan(const Plan& plan);

// Names of all presets of this build, in the order in which tables show them.
std::span<const std::string_view> PresetNames();

// One line on a preset for `kvstrata plan ls`.
std::string_view DescribePreset(std::string_view name);

// The index that the plan's segmenter keeps beside the pages; kind kNone for full and window.
IndexLayout IndexOf(const Plan& plan, const Geometry& geometry);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLAN_H_
