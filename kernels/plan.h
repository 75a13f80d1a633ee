// Plan: one choice on each axis (docs/plans.md, "Axes") and their options.
//
// Text form, one line, the same in the C ABI, the CLI and the configuration:
//     quest                                    a preset with its defaults
//     quest{budget = 1024, page = 16}          a preset with options (a TOML inline table)
//     {segmenter = "hierarchy", selector = "cascade", rho = [0.5, 0.2, 0.1]}      a plan of one's
//     own
// Named plans of the daemon's configuration ([plans.NAME]) are resolved by the daemon before this.
//
// Presets: full, window, quest, chess, tokenselect, sentencekv, sekv, mosaickv, strata.
// Other names answer INVALID_ARGUMENT with the nearest known one ("did you mean"). A combination
// that cannot work is refused here, with the reason.
//
// Defaults are those of docs/spec; each option says its source. Values; thread-safe.
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

enum class SegmenterKind : uint8_t { kNone, kPage, kHierarchy, kSentence, kSpan, kLoss };
enum class SelectorKind : uint8_t {
  kFull,
  kWindow,
  kMinMax,
  kCascade,
  kVote,
  kBucket,
  kZoom,
  kBlock
};
enum class CodecKind : uint8_t { kRaw, kLowRank, kPacked };
enum class TierKind : uint8_t { kDevice, kHost };
// What becomes of units that are not selected (docs/spec/beyond.md 1): nothing, or one row of
// means.
enum class RestKind : uint8_t { kDrop, kMean };
// Whether raw pages stay once a codec holds their rows (ADR 5). kAuto: on `host` while there is
// room.
enum class KeepRaw : uint8_t { kAuto, kNo, kHost };

std::string_view NameOf(SegmenterKind k);
std::string_view NameOf(SelectorKind k);
std::string_view NameOf(CodecKind k);
std::string_view NameOf(TierKind k);
std::string_view NameOf(RestKind k);
std::string_view NameOf(KeepRaw k);

// min_tokens = "auto".
inline constexpr int32_t kAutoTokens = -1;
// The largest min_tokens: longer than any sequence. Three of these still add up below 2^31, so that
// no sum of lengths overflows.
inline constexpr int32_t kMostMinTokens = 1 << 29;

struct Plan {
  std::string name = "full";  // the preset's name; "custom" for a plan of one's own
  SegmenterKind segmenter = SegmenterKind::kNone;
  SelectorKind selector = SelectorKind::kFull;
  CodecKind codec = CodecKind::kRaw;
  TierKind tier = TierKind::kDevice;  // where pages are taken first

  // Common to all plans (docs/spec/README.md). min_tokens: below it a sequence is attended in full;
  // kAutoTokens only until the sequence is opened (step/break_even.h).
  int32_t min_tokens = 4096;
  int32_t batch = 1;           // of min_tokens = "auto": sequences that are decoded together
  int32_t n_dense_layers = 0;  // the first layers are attended in full
  // Attended rows stand at 0 .. r - 1, the query at r - 1, instead of at their positions: of models
  // whose keys are stored before rotary embedding (docs/spec/README.md; TokenSelect, length
  // extrapolation). Codec raw.
  bool compact = false;

  // Always-on sets in tokens. window: 4 + 2044 (StreamingLLM); quest: 0 + 1, rounded outwards to
  // whole pages; chess counts in pages: see `sinks` and `window`.
  int32_t n_sink = 0;
  int32_t n_recent = 0;

  int32_t page = 16;      // tokens of a unit; quest 16, chess 32 (paper)
  int32_t budget = 2048;  // quest: tokens

  // chess (docs/spec/chess.md)
  int32_t pages_per_chunk = 8, chunks_per_grid = 8;
  int32_t sinks = 1, window = 16;               // pages
  std::array<double, 3> rho = {0.5, 0.2, 0.1};  // shares of grids, chunks, pages ("aggressive")
  enum class Cascade : uint8_t { kTop, kLiteral } cascade = Cascade::kTop;
  enum class Trigger : uint8_t { kEntropy, kEvery, kAlways } trigger = Trigger::kEntropy;
  bool trigger_or = false;  // `combine = "or"`: one threshold suffices
  // `thresholds`: mean and variance of a page's entropies, nats. Infinite: not calibrated, the
  // entropy trigger never fires and pages without entropies count towards `every`.
  std::array<double, 2> thresholds = {1.0 / 0.0, 1.0 / 0.0};
  int32_t every = 10;  // completed pages
  bool tree = false;   // unselected grids, chunks and pages as one row each (docs/spec/beyond.md 2)
  bool centred = false;  // minus the mean page vector before dot products (docs/spec/beyond.md 7)

  // Any unit-based selector over `raw` or `packed`: minmax, cascade, block
  // (docs/spec/beyond.md 1, 3).
  RestKind rest = RestKind::kDrop;
  bool group_softmax = false;  // `group = "softmax"`: heads' unit scores normalised, then summed

  // vote (docs/spec/tokenselect.md; defaults: paper)
  int32_t k = 2048, n_init = 128, n_local = 512;
  double theta = 0.9;
  bool append_departed = false;
  int32_t max_pool = 1;
  bool scale_votes = true;       // `scale`
  int32_t chunk = 512;           // of the prompt
  bool cosine_per_head = false;  // `cosine = "head"` (docs/spec/beyond.md 4)

  // bucket (docs/spec/sentencekv.md; tau, r, n_obs: paper; start, recent, pool, max_length: code)
  int32_t tau = 1024;
  double r = 2.0;
  int32_t n_obs = 32, start = 32, recent = 32, pool = 7, max_length = 100;
  bool keep_rest = false, per_query_head = false;

  // Segmenter span, selector zoom, codec lowrank (docs/spec/sekv.md; alpha and rows_share: ADR 14)
  double alpha = 2.0;
  int32_t l_min = 4, r_max = 32, d_route = 32, local = 512;
  int32_t rows = -1;  // budget, rows per head and step; -1: rows_share of N; 0: no limit
  double rows_share = 0.25;
  std::string parameters;  // file of trained parameters in the daemon's folder; "" untrained

  // block (docs/spec/mosaickv.md): a share of the tokens. Over raw pages blocks are `page` tokens.
  double share = 0.1;

  // codec packed (docs/spec/mosaickv.md; fixed preset: ADR 13)
  bool search = false;     // `strategy = "search"`; else fixed: keep, neighbours, block
  int32_t keep = 0;        // elements of a vector; 0: d / 4
  int32_t neighbours = 1;  // channels chosen together: 1, 2, 4
  int32_t block = 8;       // tokens of a block key: 4, 8, 16
  double max_channel_loss = 0.05, max_block_loss = 0.5, close_loss = 256.0;
  int32_t segment = 65536, buffer = 32;
  bool truncate = true;
  double drift = 0;  // `closing = "drift"` factor; 0: closing by loss (docs/spec/beyond.md 6)
  int32_t min_segment = 4096;  // of closing by drift

  // Codecs lowrank and packed. max_loss: the most that stored rows may differ from their own,
  // relative to them; where they would by more, the codec takes a milder form, or keeps raw rows.
  // 1: no limit.
  double max_loss = 0.3;
  KeepRaw keep_raw = KeepRaw::kAuto;
  TierKind factors = TierKind::kHost;  // of codec lowrank: where they are put, if there is room

  bool operator==(const Plan&) const = default;
};

// Parses the text form. Errors: PLAN_UNKNOWN, PLAN_OPTION_UNKNOWN, PLAN_OPTION_INVALID,
// PLAN_COMBINATION, PLAN_SYNTAX, all INVALID_ARGUMENT.
Result<Plan> ParsePlan(std::string_view text);

// Whether a plan can serve a model; ParsePlan does not know it. PLAN_COMBINATION, or
// PLAN_UNIMPLEMENTED (keys before rotary embedding under a codec), when a sequence is opened.
Status CheckGeometry(const Plan& plan, const Geometry& geometry);

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
