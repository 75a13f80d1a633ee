// SPDX-License-Identifier: Apache-2.0
// SpanShares: how much of a prompt stays at full resolution under plan sekv, by alpha
// (docs/spec/sekv.md; tests/reference/sekv.py, segment, anchor_share, persistent_share). Pure.
#ifndef KVSTRATA_CLIENT_CLI_SPAN_SHARES_H_
#define KVSTRATA_CLIENT_CLI_SPAN_SHARES_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/cli/trace.h"

namespace kvstrata::cli {

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

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_SPAN_SHARES_H_
