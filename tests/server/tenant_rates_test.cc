// SPDX-License-Identifier: Apache-2.0
// Rates by tenant, by a clock of the test's own.
#include "server/work/rates/tenant_rates.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace kvstrata {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr TokenBucket::Time kStart{std::chrono::hours(1)};

TEST(TenantRates, WhatOneMovesIsNothingToTheNext) {
  TenantRates rates({100, {}});
  EXPECT_TRUE(rates.Take("uid:1", 60, kStart));
  EXPECT_FALSE(rates.Take("uid:1", 60, kStart));
  EXPECT_TRUE(rates.Take("uid:1", 40, kStart)) << "what did not fit has taken nothing";
  EXPECT_TRUE(rates.Take("uid:2", 100, kStart));
  EXPECT_FALSE(rates.Take("uid:2", 1, kStart));
}

TEST(TenantRates, WhoWasRefusedIsCounted) {
  TenantRates rates({100, {}});
  EXPECT_TRUE(rates.Take("uid:1", 100, kStart));
  EXPECT_TRUE(rates.refused().empty());
  EXPECT_FALSE(rates.Take("uid:1", 1, kStart));
  EXPECT_FALSE(rates.Take("uid:1", 1, kStart));
  rates.Set({200, {}});  // their buckets are new, and what was is told on
  EXPECT_TRUE(rates.Take("uid:2", 200, kStart));
  EXPECT_EQ(rates.refused(), (TenantRates::Refused{{"uid:1", 2}}));
}

TEST(TenantRates, ABucketFillsUpToASecondsWorth) {
  TenantRates rates({100, {}});
  ASSERT_TRUE(rates.Take("uid:1", 100, kStart));
  EXPECT_FALSE(rates.Take("uid:1", 51, kStart + milliseconds(500)));
  EXPECT_TRUE(rates.Take("uid:1", 50, kStart + milliseconds(500)));
  EXPECT_FALSE(rates.Take("uid:1", 1, kStart + milliseconds(400))) << "a clock that went back";
  EXPECT_TRUE(rates.Take("uid:1", 100, kStart + seconds(60)));
  EXPECT_FALSE(rates.Take("uid:1", 1, kStart + seconds(60))) << "a minute's worth is not kept";
}

TEST(TenantRates, WhatIsLargerThanASecondsWorthGoesOnce) {
  TenantRates rates({100, {}});
  EXPECT_TRUE(rates.Take("uid:1", 250, kStart));
  EXPECT_FALSE(rates.Take("uid:1", 1, kStart + milliseconds(1500)));
  EXPECT_FALSE(rates.Take("uid:1", 250, kStart + milliseconds(2400)));
  EXPECT_TRUE(rates.Take("uid:1", 250, kStart + milliseconds(3000)));
}

TEST(TenantRates, AnOwnRateGoesBeforeTheUsualOne) {
  TenantRates rates({100, {{"uid:1", 0}, {"uid:2", 10}}});
  EXPECT_TRUE(rates.Take("uid:1", 1 << 30, kStart));
  EXPECT_TRUE(rates.Take("uid:2", 10, kStart));
  EXPECT_FALSE(rates.Take("uid:2", 1, kStart));
  EXPECT_TRUE(rates.Take("uid:3", 100, kStart));
  EXPECT_TRUE(rates.Take("", 1 << 30, kStart)) << "an operator has no rate";
  EXPECT_EQ(rates.buckets(), 2u);
}

TEST(TenantRates, TheSameRatesAgainFillNothing) {
  TenantRates rates({100, {}});
  ASSERT_TRUE(rates.Take("uid:1", 100, kStart));
  rates.Set({100, {}});
  EXPECT_FALSE(rates.Take("uid:1", 1, kStart));
  rates.Set({100, {{"uid:2", 5}}});
  EXPECT_TRUE(rates.Take("uid:1", 100, kStart));
  EXPECT_FALSE(rates.Take("uid:1", 1, kStart));
}

TEST(TenantRates, BucketsAreBoundedAndGoWhenTheyAreFull) {
  TenantRates rates({100, {}});
  const auto name = [](size_t i) { return "uid:" + std::to_string(i); };
  for (size_t i = 0; i < TenantRates::kMost; ++i) ASSERT_TRUE(rates.Take(name(i), 100, kStart));
  EXPECT_FALSE(rates.Take(name(TenantRates::kMost), 1, kStart)) << "one more in that second";
  EXPECT_EQ(rates.buckets(), TenantRates::kMost);
  EXPECT_TRUE(rates.Take(name(0), 50, kStart + milliseconds(500)));
  EXPECT_TRUE(rates.Take(name(TenantRates::kMost), 100, kStart + seconds(1)));
  EXPECT_EQ(rates.buckets(), 2u);
  EXPECT_FALSE(rates.Take(name(0), 51, kStart + seconds(1))) << "one in use was not made anew";
}

}  // namespace
}  // namespace kvstrata
