// SPDX-License-Identifier: Apache-2.0
// What the ops of plan sekv must give: what their refs give over the same extents on the host, each
// from what the device's op before left, so that near-ties of scores choose alike.
#pragma once

#include <gtest/gtest.h>

#include <limits>

#include "tests/cuda/captured_graph.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/span_problem.h"

namespace kvstrata::cuda {

class CheckedSpans : public SpanProblem {
 public:
  using SpanProblem::SpanProblem;

  // score_spans, and what expand_spans chooses by its scores.
  void ExpectScoresAndChoice() {
    SCOPED_TRACE(Describe(case_));
    Check(OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).score_spans(Scores(), nullptr), "score_spans");
    ExpectScores();
    Check(OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).expand_spans(Expansion(), nullptr),
          "expand_spans");
    ExpectChoice();
  }
  // All three ops.
  void ExpectLikeRef() {
    ExpectScoresAndChoice();
    SCOPED_TRACE(Describe(case_));
    PoisonWhatIsCoarse();
    Check(OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).attend_spans(Attention(), nullptr),
          "attend_spans");
    ExpectOutputs();
    ExpectCountersAreZero();
  }
  void ExpectReplayed(CapturedGraph& graph) {
    SCOPED_TRACE(Describe(case_));
    outputs_.out.Poison();
    graph.Replay();
    ExpectChoice();
    ExpectOutputs();
  }
  // Spans that the query heads read token by token, all heads together.
  int64_t expanded() const { return expanded_; }

 private:
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  // Scores of all spans; NaN is what lies behind the last one.
  void ExpectSame(const std::vector<float>& got, const std::vector<float>& want) const {
    std::vector<float> got_spans, want_spans;
    for (size_t i = 0; i < got.size(); ++i) {
      const auto b = static_cast<int>(i) / (query_heads() * span_stride_);
      if (static_cast<int32_t>(i) % span_stride_ < Spans(b)) {
        got_spans.push_back(got[i]);
        want_spans.push_back(want[i]);
      } else {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      }
    }
    EXPECT_LE(RelativeError(got_spans, want_spans), 1e-4);
  }
  void ExpectScores() const {
    const std::vector<float> relevance = outputs_.relevance.Read(), coarse = outputs_.coarse.Read();
    std::vector<float> want_relevance(relevance.size()), want_coarse(coarse.size());
    ScoreSpansBatch w = Scores();
    w.layer = HostLayer();
    w.queries.q = host_.queries.data();
    w.relevance = want_relevance.data();
    w.coarse = want_coarse.data();
    ScoreSpansRef(w);
    ExpectSame(relevance, want_relevance);
    ExpectSame(coarse, want_coarse);
    for (size_t i = 0; !case_.trained && i < coarse.size(); ++i) {
      EXPECT_TRUE(relevance[i] == coarse[i] || std::isnan(coarse[i])) << i;
    }
  }
  // By the scores of the device. Coarse logits of what a head has chosen are -inf; the list of a KV
  // head has it.
  void ExpectChoice() {
    ExpectCountersAreZero();
    const std::vector<float> relevance = outputs_.relevance.Read(), coarse = outputs_.coarse.Read();
    std::vector<float> chosen(coarse.size());
    lists_.assign(outputs_.list.size(), 0);
    counts_.assign(outputs_.list_counts.size(), -1);
    ExpandSpansBatch w = Expansion();
    w.layer = HostLayer();
    w.relevance = relevance.data();
    w.coarse = chosen.data();
    w.room = case_.room.data();
    w.list = lists_.data();
    w.counts = counts_.data();
    ExpandSpansRef(w);
    expanded_ = 0;
    for (size_t i = 0; i < coarse.size(); ++i) {
      EXPECT_EQ(coarse[i] == kNone, chosen[i] == kNone) << i;
      expanded_ += chosen[i] == kNone ? 1 : 0;
    }
    EXPECT_EQ(outputs_.list_counts.Read(), counts_);
    const std::vector<uint32_t> lists = outputs_.list.Read();
    for (int item = 0; item < batch() * case_.kv_heads; ++item)
      EXPECT_EQ(List(item, lists), List(item, lists_));
  }
  // What the list of (sequence, KV head) number `item` should have, of these lists.
  std::vector<uint32_t> List(int item, const std::vector<uint32_t>& lists) const {
    const auto from = lists.begin() + int64_t{item} * kSpanPieces * span_stride_;
    return {from, from + counts_[static_cast<size_t>(item)]};
  }
  void ExpectCountersAreZero() const {
    for (uint32_t x : outputs_.counters.Read()) EXPECT_EQ(x, 0u);
  }
  // Factors of spans that no head of the group reads.
  void PoisonWhatIsCoarse() {
    for (int b = 0; b < batch(); ++b) {
      int32_t first = 0;
      for (HostSpans& part : parts_[static_cast<size_t>(b)]) {
        for (int h = 0; h < case_.kv_heads; ++h) {
          const std::vector<uint32_t> list = List(b * case_.kv_heads + h, lists_);
          for (int32_t u = 0; u < part.spans(); ++u) {
            const auto span = [](uint32_t entry) { return static_cast<int32_t>(entry >> 8); };
            if (!std::ranges::binary_search(list, first + u, {}, span)) part.Poison(h, u);
          }
        }
        first += part.spans();
        part.Upload();
      }
    }
  }
  void ExpectOutputs() const {
    const std::vector<float> out = Floats(case_.out_dtype, outputs_.out.Read()),
                             lse = outputs_.lse.Read();
    const std::vector<float> coarse = outputs_.coarse.Read();
    std::vector<float> want(out.size()), want_lse(lse.size());
    AttendSpansBatch w = Attention();
    w.layer = HostLayer();
    w.queries.q = host_.queries.data();
    w.coarse = coarse.data();
    w.list = lists_.data();
    w.counts = counts_.data();
    w.pages.pages = host_.pages.data();
    w.window_begin = window_begin_.data();
    w.tokens = tokens_.data();
    w.to = {want.data(), DType::kF32, want_lse.data()};
    AttendSpansRef(w);
    EXPECT_LE(RelativeError(out, want), 5e-3);
    EXPECT_LE(RelativeError(lse, want_lse), 1e-3);
  }

  // The ref's choice.
  std::vector<uint32_t> lists_;
  std::vector<int32_t> counts_;
  int64_t expanded_ = 0;
};

}  // namespace kvstrata::cuda
