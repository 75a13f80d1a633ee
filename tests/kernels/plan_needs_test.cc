// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan_needs.h"

#include <algorithm>
#include <string>

#include "gmock/gmock.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

uint32_t Needs(const std::string& text) {
  const Result<Plan> plan = ParsePlan(text);
  EXPECT_TRUE(plan.ok()) << text << ": " << plan.status().ToString();
  return plan.ok() ? NeedsOf(*plan) : 0;
}

TEST(PlanNeeds, AreThoseOfSelectorAndCodec) {
  constexpr uint32_t kPrompt = kNeedTokenIds | kNeedPrefillDone;
  EXPECT_EQ(Needs("full"), kNeedTokenIds);
  EXPECT_EQ(Needs(R"({selector = "full", codec = "packed"})"), kPrompt);
  for (const char* plan : {"window", "quest", "bits", "tokenselect", "mosaickv"}) {
    EXPECT_EQ(Needs(plan), kPrompt) << plan;
  }
  EXPECT_EQ(Needs("chess"), kPrompt | kNeedEntropy);
  EXPECT_EQ(Needs("chess{trigger = \"every\"}"), kPrompt);
  EXPECT_EQ(Needs("sentencekv"), kPrompt | kNeedBoundary | kNeedPromptQueries);
  EXPECT_EQ(Needs("sekv"), kPrompt | kNeedSurprisal);
  EXPECT_EQ(Needs(R"({selector = "bucket", codec = "lowrank"})"),
            kPrompt | kNeedBoundary | kNeedSurprisal);
}

TEST(PlanNeeds, EachHasALine) {
  EXPECT_EQ(DescribeNeeds(0), "");
  const std::string text = DescribeNeeds(Needs("sekv"));
  EXPECT_THAT(text, HasSubstr("surprisal: of every prompt token"));
  EXPECT_THAT(text, Not(HasSubstr("boundary:")));
  EXPECT_EQ(std::ranges::count(text, '\n'), 2);
  uint32_t all = 0;
  for (const NeedText& t : NeedTexts()) all |= t.need;
  EXPECT_EQ(all, 63u);
}

}  // namespace
}  // namespace kvstrata
