// SPDX-License-Identifier: Apache-2.0
// score_spans and expand_spans on the GPU: scores against ref, what is chosen by them against
// selector zoom's rule.
#include "tests/cuda/checked_spans.h"

namespace kvstrata::cuda {
namespace {

class ScoreSpansCuda : public ::testing::Test {
 protected:
  Rng rng_{TestSeed()};
};

TEST_F(ScoreSpansCuda, ShapesOfModels) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int dim : {64, 128, 256}) {
      for (const int group : {1, 2, 3, 4, 5, 7, 8}) {
        SpanCase c{.dim = dim, .group = group, .kv_heads = 1 + Below(rng_, 3), .dtype = dtype};
        c.parts = {{{160, 2}, {33, 0}}, {}, {{1, 1}}, {{0, 4}}, {{90, 4}, {1, 1}, {700, 9}}};
        for (size_t b = 0; b < c.parts.size(); ++b) c.room.push_back(Below(rng_, 500));
        c.trained = group % 3 != 0;
        CheckedSpans(rng_, c, group % 2 == 0).ExpectScoresAndChoice();
      }
    }
  }
}

// Rooms from nothing to everything, thresholds, scores that are all the same: their order is that
// of the spans.
TEST_F(ScoreSpansCuda, Rooms) {
  for (const bool equal : {false, true}) {
    for (const int room : {kExpandAll, 0, 1, 37, 1000, 100000, 1 << 30}) {
      for (const float tau : {0.0f, 0.3f, 0.99f, 1.0f}) {
        SpanCase c{.dim = 64, .parts = {{{700, 10}, {500, 3}}}, .room = {room}, .tau = tau};
        c.longest = 12;
        c.equal_scores = equal;
        CheckedSpans spans(rng_, c);
        spans.ExpectScoresAndChoice();
        const bool all = room == kExpandAll || (tau == 0.0f && room > 99999);
        if (all) {
          EXPECT_EQ(spans.expanded(), 8 * 1200);
        } else if (tau == 1.0f) {
          EXPECT_EQ(spans.expanded(), 0);
        }
      }
    }
  }
}

// Rooms that end at a long span, again and again: what is short enough is taken behind it.
TEST_F(ScoreSpansCuda, ShortSpansBehindLongOnes) {
  for (const int longest : {2, 60, 900}) {
    for (const int room : {0, 1, 5, 40, 700, 3000}) {
      SpanCase c{.dim = 64, .parts = {{{900, 0}, {300, 2}}}, .room = {room}};
      c.longest = longest;
      c.rank_max = 2;
      c.trained = room % 2 == 0;
      CheckedSpans(rng_, c).ExpectScoresAndChoice();
      c.equal_scores = true;
      CheckedSpans(rng_, c).ExpectScoresAndChoice();
    }
  }
}

// More spans with one score than are ordered one by one, and scores far apart.
TEST_F(ScoreSpansCuda, ManySpansInOneRange) {
  for (const int room : {0, 37, 400, 1500, 2500}) {
    SpanCase c{.dim = 64, .parts = {{{1700, 0}, {900, 0}}}, .room = {room}};
    c.longest = 3;
    c.equal_scores = true;
    CheckedSpans(rng_, c).ExpectScoresAndChoice();
    c.equal_scores = false;
    c.norm = 50;
    CheckedSpans(rng_, c).ExpectScoresAndChoice();
  }
}

TEST_F(ScoreSpansCuda, ManySpansAndManySequences) {
  SpanCase c{.dim = 64, .group = 2, .kv_heads = 1, .parts = {{{30000, 1}, {26001, 0}}}};
  c.longest = 9;
  c.rank_max = 2;
  c.room = {4000};
  CheckedSpans(rng_, c).ExpectScoresAndChoice();
  c.group = 1;
  c.kv_heads = 3;
  c.parts.assign(64, {{40, 20}});
  c.room.assign(64, 60);
  CheckedSpans(rng_, c).ExpectScoresAndChoice();
}

// Tiles that are few spans of a part each, and parts without any.
TEST_F(ScoreSpansCuda, AsManyPartsAsThereMayBe) {
  SpanCase c{.parts = {{}, {{3, 1}}}, .room = {2000, 5}};
  for (int i = 0; i < kSpanPartsMax; ++i) c.parts[0].push_back({Below(rng_, 40), 0});
  c.longest = 9;
  CheckedSpans(rng_, c).ExpectScoresAndChoice();
}

TEST_F(ScoreSpansCuda, RefusesOtherShapes) {
  const CudaOps& ops = *kvs_cuda_ops();
  const SpanProblem problem(rng_, {.parts = {{{8, 2}}}, .room = {5}});
  ScoreSpansBatch s = problem.Scores();
  s.layer.part_stride = kSpanPartsMax + 1;
  EXPECT_EQ(OpsOf<SpanOps>(ops.lowrank).score_spans(s, nullptr), cudaErrorInvalidValue);
  ExpandSpansBatch e = problem.Expansion();
  e.layer.span_stride = 40;
  EXPECT_EQ(OpsOf<SpanOps>(ops.lowrank).expand_spans(e, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace kvstrata::cuda
