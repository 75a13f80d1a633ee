// SPDX-License-Identifier: Apache-2.0
// What linked_bench measures: plans by the names of its rows, and how many layers a model has of
// each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/segment/span_rule.h"

namespace kvstrata::cuda {

inline constexpr int kKvHeads = 8, kHeads = 32, kDim = 128, kPage = 16, kReplays = 60,
                     kLayersOfAModel = 32;
inline constexpr int64_t kTokenBytes =
    int64_t{2} * kKvHeads * kDim * 2;                     // bytes of a token in a layer
inline constexpr int64_t kMostBytes = int64_t{48} << 30;  // bytes of sequences' pages
inline constexpr int64_t kMostOfFew = int64_t{64} << 30;  // bytes of two layers
inline constexpr int32_t kChunk = 4096;                   // tokens of a prefill step

struct Plan {
  const char* name;
  const char* text;
  int64_t (*rows_read)(int64_t tokens);  // rows of a layer, summaries included
  int period = 1;                        // steps, of which Begin selects in one
  int steps_a_query = 0;                 // the query moves away after so many steps; 0: it stays
  int most_layers = kLayersOfAModel;     // fewer where the daemon's CPUs pack the prompt first
  bool sentences = false;                // boundaries are reported, and the last queries observed
  bool spans = false;                    // surprisal is reported, and text ends with a budget
  bool agreed = false;                   // the query heads of a group have the same query
  bool surprisals = false;               // random ones are reported where none are given
  int percent = 0;                       // part of the tokens; text ends with a budget of them
};
inline constexpr int kObserved = 32;     // last prompt tokens, which go through attention
inline constexpr double kSentence = 27;  // median of its tokens (the paper's corpora: 25 to 30)
inline constexpr int64_t kTokenRows = 2048 + 128 + 512;  // that TokenSelect attends
inline constexpr int32_t kSpanWindow = 512, kShortestSpan = 4;
inline constexpr double kAnchorDeviations = 2;
// Defaults of the plan, but for the rank, the place of factors and the budget (SpanBudget).
inline constexpr char kSpanPlan[] =
    "sekv{max_loss = 1, r_max = 16, factors = \"device\", keep_raw = \"no\", min_tokens = 0, rows "
    "= ";
inline constexpr float kSpanQueryScale = 16;  // factor of normal queries: relevance outweighs ln n
inline const Plan kPlans[] = {
    {"full", "full", [](int64_t n) { return n; }},
    {"quest", "quest{budget = 2048, min_tokens = 0}", [](int64_t n) { return n / 16 + 2048; }},
    {"quest_softmax",
     "quest{page = 32, n_sink = 4, n_recent = 64, group = \"softmax\", budget = 2048, "
     "min_tokens = 0}",
     [](int64_t n) { return n / 32 + 2048; }},
    // 40 bytes of 512 a token, and the always-on ones.
    {"bits", "bits{budget = 2048, min_tokens = 0}",
     [](int64_t n) { return n * 40 / 512 + 2048 + 68; }},
    // Budgets at which answers lose about as little (docs/accuracy.md).
    {.name = "quest_29pct",
     .text = "quest{min_tokens = 0, budget = ",
     .rows_read = [](int64_t n) { return n / 16 + n * 29 / 100; },
     .percent = 29},
    {.name = "bits_5pct",
     .text = "bits{min_tokens = 0, budget = ",
     .rows_read = [](int64_t n) { return n * 40 / 512 + n * 5 / 100 + 68; },
     .percent = 5},
    // The same, and what finding that many takes: random keys have no smaller share.
    {"bits_missed", "bits{max_missed = 0.01, budget = 2048, min_tokens = 0}",
     [](int64_t n) { return n * 40 / 512 + 2048 + 68; }},
    // 1 %, a sink and a window of 16 pages that is half of 320 tokens longer at the mean.
    {"chess", "chess{trigger = \"every\", every = 10, min_tokens = 0}",
     [](int64_t n) { return n / 100 + 17 * 32 + 160; }, 320},
    // Means, of 8 heads as large as a token: about 300 buckets of random keys.
    {"sentencekv", "sentencekv{min_tokens = 0}",
     [](int64_t) { return int64_t{1024 + 32 + 40 + 300}; }, 320, 0, kLayersOfAModel, true},
    {"tokenselect_miss", "tokenselect{theta = 1, min_tokens = 0}",
     [](int64_t n) { return n / 2 + kTokenRows; }},
    {"tokenselect_hit", "tokenselect{min_tokens = 0}", [](int64_t) { return kTokenRows; }},
    {"tokenselect_0.9", "tokenselect{min_tokens = 0}",
     [](int64_t n) { return n / 20 + kTokenRows; }, 1, 10},
    // A packed row has 5 of 16 of a raw one's bytes; block keys are as many bytes as what is taken.
    {"mosaickv", "mosaickv{max_loss = 1, share = 0.0625, min_tokens = 0}",
     [](int64_t n) { return (n / 16 + n / 16) * 5 / 16 + 32; }},
    // 1000 tokens of GPL-3 give 65 raw ones and 43 means; factors of 20 rows are 17 rows' bytes,
    // for each of 4 heads, or for all.
    {.name = "sekv",
     .text = kSpanPlan,
     .rows_read = [](int64_t n) { return n * (65 + 43 + 4 * 17) / 1000 + kSpanWindow; },
     .most_layers = 4,
     .spans = true},
    {.name = "sekv_agreed",
     .text = kSpanPlan,
     .rows_read = [](int64_t n) { return n * (65 + 43 + 17) / 1000 + kSpanWindow; },
     .most_layers = 4,
     .spans = true,
     .agreed = true},
};
inline constexpr int kPeriods = 9;
inline constexpr size_t kCalls = 160;  // that are timed outside a graph, of all layers
inline constexpr int kWarmSteps = 5;   // eager ones, behind which the library knows the calls
// The plans of the rows of pool_rows.h. The first one is what the others are compared with.
inline const std::vector<Plan> kPoolPlans = {
    {"full", "full", nullptr},
    {"quest", "quest{budget = 2048, min_tokens = 0}", nullptr},
    {"chess", "chess{trigger = \"every\", every = 10, min_tokens = 0}", nullptr},
    {"sentencekv", "sentencekv{min_tokens = 0}", nullptr, 1, 0, kLayersOfAModel, true},
    {"tokenselect", "tokenselect{min_tokens = 0}", nullptr},
    {"mosaickv", "mosaickv{max_loss = 1, keep_raw = \"no\", min_tokens = 0}", nullptr},
    {.name = "sekv",
     .text = "sekv{max_loss = 1, min_tokens = 0}",
     .rows_read = nullptr,
     .most_layers = 2,
     .surprisals = true},
};

// Rows that are read in any case, and 2 % of the tokens.
inline int32_t SpanBudget(const std::vector<float>& surprisal) {
  const auto tokens = static_cast<int32_t>(surprisal.size()), end = tokens - kSpanWindow;
  const double threshold = AnchorThreshold(surprisal, tokens, kAnchorDeviations);
  int32_t rows = tokens + tokens / 50;
  for (const Run& s : SpansIn(surprisal, {0, end}, threshold, kShortestSpan)) {
    rows -= s.end - s.begin - 1;
  }
  return rows;
}

inline std::string TextOf(const Plan& plan, int32_t tokens, const std::vector<float>& surprisal) {
  const std::string text = plan.text;
  if (plan.spans) return text + std::to_string(SpanBudget(surprisal)) + "}";
  return plan.percent > 0 ? text + std::to_string(tokens / 100 * plan.percent) + "}" : text;
}

// The model's layers. The daemon's CPUs factor the spans of every layer: so many tokens in 56 s (16
// cores).
inline int LayersOf(const Plan& plan, int batch, int64_t tokens) {
  constexpr int64_t kFactoredTokens = 2048 * 1024;
  const int64_t most =
      plan.spans ? std::clamp<int64_t>(kFactoredTokens / (batch * tokens), 1, plan.most_layers)
                 : plan.most_layers;
  // Two at least, if they fit: with one a page is 64 KiB, which no model's is.
  const int64_t layer = batch * tokens * kTokenBytes,
                few = std::min<int64_t>(kMostOfFew / layer, 2);
  return static_cast<int>(std::clamp<int64_t>(std::max(kMostBytes / layer, few), 1, most));
}

}  // namespace kvstrata::cuda
