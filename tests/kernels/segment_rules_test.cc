// SPDX-License-Identifier: Apache-2.0
// Where spans and sentences end (docs/spec/sekv.md 1, 2; docs/spec/sentencekv.md 1).
#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "kernels/segment/sentence_rule.h"
#include "kernels/segment/span_rule.h"

namespace kvstrata {
namespace {

using Tokens = Run;  // testing::Test has a Run of its own
using Runs = std::vector<Run>;
using Ints = std::vector<int32_t>;

TEST(SpanRule, SpansAreTheRunsBetweenAnchors) {
  const std::vector<float> h = {0, 1, 1, 9, 1, 1, 1, 1, 9, 9, 1, 1, 1};
  const double threshold = AnchorThreshold(h, 13, 1.0);
  EXPECT_EQ(AnchorsIn(h, {0, 13}, threshold), (Ints{0, 3, 8, 9}));
  EXPECT_EQ(SpansIn(h, {0, 13}, threshold, 1), (Runs{{1, 3}, {4, 8}, {10, 13}}));
  EXPECT_EQ(SpansIn(h, {0, 13}, threshold, 3), (Runs{{4, 8}, {10, 13}}));
  EXPECT_EQ(SpansIn(h, {0, 7}, threshold, 3), (Runs{{4, 7}})) << "cut before l_min is applied";
  EXPECT_EQ(SpansIn(h, {0, 6}, threshold, 3), Runs{});
  EXPECT_EQ(SpansIn(h, {5, 13}, threshold, 3), (Runs{{5, 8}, {10, 13}}));
}

TEST(SpanRule, EqualSurprisalsMakeNoAnchors) {
  std::vector<float> h(1000, 0.1f);
  h[0] = 7;  // H_0 is 0 whatever is reported
  EXPECT_EQ(AnchorsIn(h, {0, 1000}, AnchorThreshold(h, 1000, 1.0)), Ints{0});
  const std::vector<float> zeros(100, 0.0f);
  EXPECT_EQ(AnchorsIn(zeros, {0, 100}, AnchorThreshold(zeros, 100, 0.0)), Ints{0});
}

TEST(SpanRule, ThresholdIsMeanPlusDeviations) {
  const std::vector<float> h = {0, 2, 4, 2};
  EXPECT_NEAR(AnchorThreshold(h, 4, 1.0), 2 + std::sqrt(2.0) + 1e-6, 1e-12);
  EXPECT_NEAR(AnchorThreshold(h, 2, 2.0), 1 + 2 + 1e-6, 1e-12) << "of the prompt alone";
}

TEST(SpanRule, KnowsWhatIsMissing) {
  std::vector<float> h = {NAN, 1, 2, NAN, 3};
  EXPECT_TRUE(HasSurprisal(h, {0, 3}));
  EXPECT_FALSE(HasSurprisal(h, {0, 4}));
  EXPECT_TRUE(HasSurprisal(h, {4, 5}));
  EXPECT_FALSE(HasSurprisal(h, {4, 6}));
  EXPECT_TRUE(HasSurprisal({}, {0, 0}));
}

TEST(SpanRule, PositionsBetweenSpans) {
  EXPECT_EQ(PositionsBetween({2, 10}, Runs{{3, 5}, {8, 10}}), (Ints{2, 5, 6, 7}));
  EXPECT_EQ(PositionsBetween({2, 4}, Runs{}), (Ints{2, 3}));
  EXPECT_EQ(PositionsBetween({2, 4}, Runs{{2, 4}}), Ints{});
}

TEST(SentenceRule, BoundariesAndLengthEndSentences) {
  const std::vector<uint8_t> boundary = {0, 0, 1, 1, 0, 0, 0, 0, 0};
  EXPECT_EQ(SentencesIn(boundary, {0, 9}, 100), (Runs{{0, 3}, {3, 4}, {4, 9}}));
  EXPECT_EQ(SentencesIn(boundary, {0, 9}, 2),
            (Runs{{0, 2}, {2, 3}, {3, 4}, {4, 6}, {6, 8}, {8, 9}}));
  EXPECT_EQ(SentencesIn(boundary, {0, 12}, 100).back(), (Tokens{4, 12}))
      << "none beyond what is given";
  EXPECT_EQ(SentencesIn(boundary, {0, 0}, 100), Runs{});
  EXPECT_EQ(SentencesIn(boundary, {2, 4}, 100), (Runs{{2, 3}, {3, 4}}));
}

TEST(SentenceRule, TokenByTokenIsTheSame) {
  std::mt19937_64 random(80);
  std::vector<uint8_t> boundary(500);
  for (uint8_t& b : boundary) b = random() % 9 == 0;
  SentenceRule rule(12);
  Runs sentences;
  Tokens ended;
  for (const uint8_t b : boundary) {
    if (rule.Add(b != 0, &ended)) sentences.push_back(ended);
  }
  const Tokens open = rule.open();
  if (rule.Cut(&ended)) {
    EXPECT_EQ(ended, open);
    sentences.push_back(ended);
  }
  EXPECT_FALSE(rule.Cut(&ended));
  EXPECT_EQ(sentences, SentencesIn(boundary, {0, 500}, 12));
}

}  // namespace
}  // namespace kvstrata
