// SPDX-License-Identifier: Apache-2.0
// Calibrate: the numbers that plans want to know of a model before anybody chooses, from traces of
// it: entropy thresholds (chess), anchor and persistent shares (sekv), query cosines (tokenselect),
// packing losses (mosaickv) and break-even lengths.
//
// The first three come from the traces alone; the last two run them on a daemon. A section whose
// input is missing says so in its status; the others are not affected. Threads: one.
// Errors: CALIBRATE_MODELS (traces of different models), and those of the connection.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/cli/metrics.h"
#include "client/cli/replay.h"
#include "client/cli/trace.h"

namespace kvstrata::cli {

// QueryCosines: how alike the queries of consecutive decode steps are, and how often plan
// tokenselect would reuse a selection for it (docs/spec/tokenselect.md 3; docs/spec/beyond.md 4).
// Pure.

inline constexpr std::array<double, 4> kThetas = {0.8, 0.85, 0.9, 0.95};

struct LayerCosines {
  int32_t layer = 0;
  Distribution flattened;  // all heads as one vector; a sample a pair of steps
  Distribution smallest;   // the smallest among the heads' own cosines
};

// The steps of a layer whose query is as near to the one that selected last as theta asks.
struct HitRate {
  double theta = 0;
  double flattened = 0;  // cosine = "flat", the preset's
  double per_head = 0;   // cosine = "head": the smallest
};

struct QueryCosines {
  std::string status = "ok";
  int64_t steps = 0;  // in all traces; the first of each always selects
  std::vector<LayerCosines> layers;
  std::vector<HitRate> hit_rates;  // over all layers and steps
};

QueryCosines MeasureQueryCosines(const std::vector<Trace>& traces);

// EntropyPages: what a model's next-token entropies are over whole pages of generated tokens, and
// the thresholds of plan chess that follow (docs/spec/chess.md 6; tests/reference/chess.py,
// calibrate). Pure.
struct EntropyPages {
  static constexpr int32_t kPage = 32;  // tokens; chess's own default
  static constexpr double kPercentile = 99;

  std::string status = "ok";
  // A sample a page, nats: of the pages that hold generated tokens only, as the daemon cuts them
  // (multiples of kPage from position 0).
  Distribution means, variances;
  std::array<double, 2> thresholds{};  // percentile of each, linearly interpolated
  double share_over = 0;               // share of the pages with both above their thresholds
};

EntropyPages MeasureEntropyPages(const std::vector<Trace>& traces);

// BreakEven: from which length on a plan's decode step is faster than full attention's, measured on
// prefixes of a trace on a running daemon.
// Cost: for each plan and length a prefill and up to 32 steps of the plan and of `full`, in
// lockstep. Errors: those of the connection; anything about a plan becomes its status.
struct BreakEvenPoint {
  int32_t tokens = 0;               // tokens of the prompt
  double full_ms = 0, plan_ms = 0;  // medians over the steps
  bool sparse = false;              // the plan read fewer rows than full attention

  double ratio() const { return full_ms > 0 ? plan_ms / full_ms : 1; }
  bool faster() const { return sparse && ratio() < 1; }
};

struct BreakEvenPlan {
  std::string name;  // the preset
  std::string plan;  // as opened: without a smallest length
  std::string status = "ok";
  std::vector<BreakEvenPoint> points;  // ascending
  std::optional<double> tokens;        // none: not faster at the longest, or nothing measured
};

struct BreakEven {
  std::string status = "ok";
  size_t trace = 0;  // which: the one with the longest prompt
  int32_t steps = 0;
  std::vector<BreakEvenPlan> plans;
};

// The length from which on every point is faster than full attention. Where the point before is as
// sparse and slower, the ratio is interpolated linearly between the two; where it attends in full
// (its ratio says nothing), or there is none, it is the first faster point's own length.
std::optional<double> BreakEvenLength(const std::vector<BreakEvenPoint>& points);

// 512, 1024, 2048 .. below `prompt`, and `prompt`.
std::vector<int32_t> BreakEvenLengths(int32_t prompt);

Result<BreakEven> MeasureBreakEven(const std::vector<Trace>& traces, const ReplayOptions& options,
                                   const ReplayProgress& progress);

// SpanShares: how much of a prompt stays at full resolution under plan sekv, by alpha
// (docs/spec/sekv.md; tests/reference/sekv.py, segment, anchor_share, persistent_share). Pure.

inline constexpr std::array<double, 6> kAlphas = {0.5, 1.0, 1.5, 2.0, 2.5, 3.0};
// Plan sekv's own defaults.
inline constexpr int32_t kShortestSpan = 4, kLocalWindow = 512;

// Where a prompt is cut; half-open spans.
struct Spans {
  int64_t anchors = 0;
  std::vector<std::array<int32_t, 2>> spans;

  int64_t tokens() const;  // within spans; the others stay raw
};
Spans CutSpans(std::span<const float> surprisal, double alpha, int32_t shortest, int32_t local);

// Spans whose length is in [from, to); the last bin has no end (to = 0).
struct LengthBin {
  int32_t from = 0, to = 0;
  int64_t spans = 0, tokens = 0;
};

// Over the prompts of all traces together, the local window not counted, but for the budgets.
struct AlphaShare {
  double alpha = 0;
  double anchor_share = 0;      // anchors among the tokens
  double persistent_share = 0;  // raw tokens and one row a span
  int64_t spans = 0;
  std::vector<LengthBin> lengths;
  // The smallest budget (rows per head and step, and as a share of the tokens) that holds the
  // persistent rows of every trace, window included, until its last step.
  int64_t budget_rows = 0;
  double budget_share = 0;
};

struct SpanShares {
  std::string status = "ok";
  int64_t tokens = 0;  // tokens of prompts with surprisals
  std::vector<AlphaShare> alphas;
};

SpanShares MeasureSpanShares(const std::vector<Trace>& traces);

struct CalibrateOptions {
  std::string socket;
  std::chrono::milliseconds timeout{5000};
  bool offline = false;  // only what needs no daemon
};

// PackingLosses: what plan mosaickv makes of the traces' prompts on a running daemon: the
// strategies that its search chose, and the channel loss by how much is kept
// (docs/spec/mosaickv.md 5). Errors: those of the connection; anything about the plan or its arrays
// becomes a status.
struct StrategyCount {
  std::array<int32_t, 3>
      strategy{};     // elements kept, neighbours chosen together, tokens of a block
  int64_t count = 0;  // (segment, layer, KV head)
};

struct ChannelLoss {
  int32_t keep = 0;   // elements of a vector
  Distribution loss;  // over (segment, layer, KV head), keys and values as the daemon lists them
};

struct PackingLosses {
  // A plan packs from min_tokens on; a calibration wants to know at any length.
  std::string plan = "mosaickv{strategy = \"search\", max_loss = 1, min_tokens = 0}";
  std::string status = "ok";
  std::vector<StrategyCount> strategies;  // the most frequent first
  // "ok", or why `losses` is empty: the daemon need not have the array "losses", F32 [..., 4],
  // whose last dimension is the loss at d/8, d/4, 3d/8 and d/2.
  std::string losses_status = "ok";
  std::vector<ChannelLoss> losses;
};

// A failure that concerns one plan or array and not the daemon as a whole: a section's status.
bool IsOfSection(const Status& status);

Result<PackingLosses> MeasurePackingLosses(const std::vector<Trace>& traces,
                                           const ReplayOptions& options,
                                           const ReplayProgress& progress);

struct Calibration {
  EntropyPages entropy;
  SpanShares spans;
  QueryCosines cosines;
  PackingLosses packing;
  BreakEven break_even;
};

// `names` are the traces' paths, for messages. REQUIRES: as many names as traces, at least one.
Status CheckSameModel(const std::vector<Trace>& traces, const std::vector<std::string>& names);

Result<Calibration> Calibrate(const std::vector<Trace>& traces,
                              const std::vector<std::string>& names,
                              const CalibrateOptions& options, const ReplayProgress& progress);

}  // namespace kvstrata::cli
