// SPDX-License-Identifier: Apache-2.0
// Selector cascade with a list for each layer or KV head, and lists chosen by queries
// (docs/spec/chess.md 7), against sums written out in double precision. The property test has the
// cascade itself and every trigger.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "gmock/gmock.h"
#include "kernels/select/selector.h"
#include "tests/kernels/held_sequence.h"

namespace kvstrata {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

constexpr uint64_t kSeed = 57;
constexpr int32_t kPage = 8, kPrompt = 203, kEnd = 230;

// A quarter of the pages, whatever their chunks and grids.
std::string Text(const std::string& options) {
  return "chess{min_tokens = 0, page = 8, window = 1, rho = [1, 1, 0.25], " + options + "}";
}

class PageLists : public EachBackend {
 protected:
  void Prefill(HeldSequence* s) {
    RunTo(*s, in_, kPrompt, kPrompt, backend());
    PrefillDone(*s, backend());
  }
  static int32_t WindowStart(int32_t n) { return (n - 1 + kPage - 1) / kPage - 1; }
  // Queries of a KV head's group.
  std::vector<Floats> QueriesOf(int32_t n, int layer, int head) const {
    std::vector<Floats> queries;
    for (int i = 0; i < in_.g.group(); ++i) {
      const float* q = in_.Query(n - 1, layer, head * in_.g.group() + i);
      queries.emplace_back(q, q + in_.g.head_dim);
    }
    return queries;
  }
  // The mean of the keys of [begin, end), a complete page's as it is stored.
  Floats KeysOf(int32_t begin, int32_t end, int layer, int head) const {
    Floats mean(in_.g.head_dim);
    for (int c = 0; c < in_.g.head_dim; ++c) {
      for (int32_t t = begin; t < end; ++t) mean[c] += in_.Key(t, layer, head)[c];
      mean[c] /= static_cast<float>(end - begin);
      if (end - begin == kPage) mean[c] = ToFloat(FromFloat<BF16>(mean[c]));
    }
    return mean;
  }
  // Scores of the pages from the second on that lie before the window, of a KV head.
  std::vector<double> Scores(const std::vector<Floats>& anchors, int32_t n, int layer,
                             int head) const {
    std::vector<double> scores;
    for (int32_t page = 1; page < WindowStart(n); ++page) {
      const Floats key = KeysOf(page * kPage, (page + 1) * kPage, layer, head);
      double largest = -INFINITY;
      for (const Floats& anchor : anchors) {
        largest =
            std::max(largest, std::inner_product(key.begin(), key.end(), anchor.begin(), 0.0));
      }
      scores.push_back(largest);
    }
    return scores;
  }
  // The page table that a quarter of the best is; empty where noise may turn it.
  static Ints Table(const std::vector<double>& scores, int32_t n) {
    const auto k = static_cast<size_t>(std::ceil(0.25 * static_cast<double>(scores.size()) - 1e-9));
    Ints order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
    if (scores[order[k - 1]] - scores[order[k]] < 1e-4 * std::abs(scores[order[0]])) return {};
    Ints table(order.begin(), order.begin() + static_cast<int64_t>(k));
    for (int32_t& page : table) ++page;
    table.push_back(0);
    for (int32_t page = WindowStart(n); page * kPage < n; ++page) table.push_back(page);
    std::ranges::sort(table);
    return table;
  }

  Inputs in_{{.layers = 3, .query_heads = 6, .kv_heads = 2, .head_dim = 64}, kEnd, kSeed};
};

// Every step's lists, of one page of window: a quarter of what each list scores, or its sum.
TEST_P(PageLists, EachIsChosenByItsOwnAnchor) {
  for (const bool by_query : {true, false}) {
    const std::string anchor = by_query ? "anchor = \"query\", " : "anchor = \"keys\", ";
    HeldSequence by_layer(in_.g, Text(anchor + "lists = \"layer\", trigger = \"always\"")),
        by_head(in_.g, Text(anchor + "lists = \"head\", trigger = \"always\""));
    Prefill(&by_layer);
    Prefill(&by_head);
    int compared = 0;
    for (int32_t n = kPrompt + 1; n <= kEnd; ++n) {
      const auto layers = RunStep(by_layer, in_, 1, backend()).selections;
      const auto heads = RunStep(by_head, in_, 1, backend()).selections;
      for (int layer = 0; layer < in_.g.layers; ++layer) {
        ASSERT_EQ(layers[layer].groups(), 1);
        ASSERT_EQ(heads[layer].groups(), in_.g.kv_heads);
        ASSERT_EQ(heads[layer].scored_bytes > 0, by_query || n > kPrompt + 1);
        std::vector<double> sum(WindowStart(n) - 1);
        for (int head = 0; head < in_.g.kv_heads; ++head) {
          const std::vector<Floats> own =
              by_query ? QueriesOf(n, layer, head)
                       : std::vector<Floats>{KeysOf(WindowStart(n) * kPage, n - 1, layer, head)};
          const std::vector<double> scores = Scores(own, n, layer, head);
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += scores[i];
          const Ints table = Table(scores, n);
          if (table.empty()) continue;
          ASSERT_EQ(heads[layer].units[head], table) << "seed " << kSeed << " n " << n;
          ++compared;
        }
        const Ints table = Table(sum, n);
        if (table.empty()) continue;
        ASSERT_EQ(layers[layer].units[0], table) << "seed " << kSeed << " n " << n;
      }
    }
    EXPECT_GT(compared, 140) << anchor;  // out of 162
  }
}

TEST_P(PageLists, StayUntilASelectionIsDue) {
  HeldSequence s(in_.g,
                 Text("lists = \"head\", anchor = \"query\", trigger = \"every\", every = 2"));
  Prefill(&s);
  int changes = 0;
  std::vector<Selection> before = RunStep(s, in_, 1, backend()).selections;
  EXPECT_GT(before[0].scored_bytes, 0);
  for (int32_t n = kPrompt + 2; n <= kEnd; ++n) {
    const std::vector<Selection> now = RunStep(s, in_, 1, backend()).selections;
    // Pages are complete at 208, 216 and 224 tokens.
    const bool due = n == 217;
    EXPECT_EQ(now[1].scored_bytes > 0, due) << n;
    for (int layer = 0; layer < in_.g.layers; ++layer) {
      Ints kept = now[layer].units[1];
      kept.resize(std::min(kept.size(), before[layer].units[1].size()));
      if (kept != before[layer].units[1]) ++changes;
      ASSERT_TRUE(due || kept == before[layer].units[1]) << n;
    }
    before = now;
  }
  EXPECT_GT(changes, 0);
}

TEST_P(PageLists, AStepThatWasGivenUpChoosesNothing) {
  const std::string text = Text("lists = \"layer\", anchor = \"query\", trigger = \"every\"");
  HeldSequence plain(in_.g, text), other(in_.g, text);
  Prefill(&plain);
  Prefill(&other);
  const Inputs drafts(in_.g, kEnd, kSeed + 1);
  {
    std::vector<float> out(in_.g.query_heads * in_.g.head_dim);
    Step step({{other.state.get(), other.View(1), 1}}, backend(), InlineExecutor());
    const int64_t head = in_.g.head_dim * int64_t{sizeof(float)};
    EXPECT_TRUE(step.Append(0, in_.Packed(drafts.keys, in_.g.kv_heads, kPrompt, 0),
                            in_.Packed(drafts.values, in_.g.kv_heads, kPrompt, 0))
                    .ok());
    step.Attend(
        0, drafts.Packed(drafts.queries, in_.g.query_heads, kPrompt, 0),
        {reinterpret_cast<std::byte*>(out.data()), in_.g.query_heads * head, head, DType::kF32},
        nullptr);
  }
  EXPECT_EQ(RunStep(other, in_, 1, backend()).out, RunStep(plain, in_, 1, backend()).out);
}

TEST_P(PageLists, ATokenThatIsTakenBackTakesItsChoiceWithIt) {
  const std::string text = Text("lists = \"head\", anchor = \"query\", trigger = \"every\"");
  HeldSequence plain(in_.g, text), other(in_.g, text);
  Prefill(&plain);
  Prefill(&other);
  RunStep(other, Inputs(in_.g, kEnd, kSeed + 1), 1, backend());
  other.state->Truncate(kPrompt);
  EXPECT_EQ(RunStep(other, in_, 1, backend()).out, RunStep(plain, in_, 1, backend()).out);
}

TEST_P(PageLists, OfTheWholeModelIsTheDefault) {
  HeldSequence plain(in_.g, Text("trigger = \"always\"")),
      named(in_.g, Text("trigger = \"always\", lists = \"model\", anchor = \"keys\""));
  EXPECT_EQ(plain.state->plan(), named.state->plan());
  EXPECT_EQ(FormatPlan(plain.state->plan()).find("lists"), std::string::npos);
  const std::string text = FormatPlan(PlanOf(Text("lists = \"head\", anchor = \"query\"")));
  EXPECT_THAT(text, ::testing::EndsWith("tree = false, lists = \"head\", anchor = \"query\"}"));
}

KVS_FOR_EACH_BACKEND(PageLists);

}  // namespace
}  // namespace kvstrata
