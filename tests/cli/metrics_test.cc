// SPDX-License-Identifier: Apache-2.0
// Metrics against values worked out by hand.
#include "client/cli/metrics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cli/trace_file.h"

namespace kvstrata::cli {
namespace {

TEST(Metrics, PercentilesInterpolateLinearly) {
  Distribution d;
  EXPECT_EQ(d.Mean(), 0);
  EXPECT_EQ(d.Percentile(5), 0);
  for (const double x : {4.0, 1.0, 3.0, 2.0, 5.0}) d.Add(x);
  EXPECT_DOUBLE_EQ(d.Mean(), 3.0);
  EXPECT_DOUBLE_EQ(d.Percentile(0), 1.0);
  EXPECT_DOUBLE_EQ(d.Percentile(5), 1.2);
  EXPECT_DOUBLE_EQ(d.Percentile(95), 4.8);
  EXPECT_DOUBLE_EQ(d.Percentile(100), 5.0);
}

TEST(Metrics, RelativeError) {
  const float a[] = {3, 0}, b[] = {0, 4}, zero[] = {0, 0};
  EXPECT_DOUBLE_EQ(RelativeError(a, b), 1.25);
  EXPECT_EQ(RelativeError(b, b), 0);
  EXPECT_EQ(RelativeError(zero, zero), 0);
  EXPECT_TRUE(std::isinf(RelativeError(a, zero)));
}

TEST(Metrics, OracleTakesTheLargestAndTheLowerOfEquals) {
  // One channel, two heads side by side; head 1 has keys 1, 3, 2, 3, -5.
  const float head[] = {1, 3, 2, 3, -5};
  std::vector<uint16_t> keys;
  for (const float x : head) {
    keys.push_back(ToBf16(99));
    keys.push_back(ToBf16(x));
  }
  const uint16_t q = ToBf16(2), negative = ToBf16(-1);
  const KeyRows rows{keys.data() + 1, 2, 1};
  const auto best = [&rows](const uint16_t* query, int32_t n, int32_t k) {
    return BestOf(Scores(rows, query, n), k);
  };
  EXPECT_EQ(best(&q, 5, 1), std::vector<int32_t>({1}));
  EXPECT_EQ(best(&q, 5, 3), std::vector<int32_t>({1, 2, 3}));
  EXPECT_EQ(best(&q, 4, 4), std::vector<int32_t>({0, 1, 2, 3}));
  EXPECT_EQ(best(&negative, 5, 1), std::vector<int32_t>({4}));
  EXPECT_TRUE(best(&q, 5, 0).empty());
}

TEST(Metrics, RelativeDistanceIsOfAThird) {
  const std::vector<double> a = {3, 0}, b = {0, 4}, of = {0, 10}, zero = {0, 0};
  EXPECT_DOUBLE_EQ(RelativeDistance(a, b, of), 0.5);
  EXPECT_EQ(RelativeDistance(a, a, zero), 0);
  EXPECT_TRUE(std::isinf(RelativeDistance(a, b, zero)));
}

TEST(Metrics, Cosine) {
  const uint16_t a[] = {ToBf16(3), ToBf16(4)}, b[] = {ToBf16(4), ToBf16(3)};
  const uint16_t c[] = {ToBf16(-6), ToBf16(-8)}, zero[] = {ToBf16(0), ToBf16(0)};
  EXPECT_DOUBLE_EQ(Cosine(a, b), 0.96);
  EXPECT_DOUBLE_EQ(Cosine(a, c), -1);
  EXPECT_EQ(Cosine(a, zero), 0);
  EXPECT_EQ(Cosine(zero, zero), 0);
}

TEST(Metrics, OverlapIsTheShareOfTheOracle) {
  const int32_t a[] = {0, 2, 4, 6}, b[] = {2, 3, 4, 5};
  EXPECT_DOUBLE_EQ(Overlap(a, b), 0.5);
  EXPECT_DOUBLE_EQ(Overlap(a, a), 1);
  EXPECT_DOUBLE_EQ(Overlap(a, {}), 1);
  EXPECT_DOUBLE_EQ(Overlap({}, a), 0);
}

TEST(Metrics, SpreadTakesBothEnds) {
  EXPECT_EQ(SpreadOver(3, 16), std::vector<int32_t>({0, 1, 2}));
  EXPECT_EQ(SpreadOver(10, 4), std::vector<int32_t>({0, 3, 6, 9}));
  EXPECT_EQ(SpreadOver(5, 1), std::vector<int32_t>({0}));
  EXPECT_TRUE(SpreadOver(0, 4).empty());
}

}  // namespace
}  // namespace kvstrata::cli
