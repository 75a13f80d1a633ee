// SPDX-License-Identifier: Apache-2.0
// Which of several causes is told, and that its figure is the length where choosing begins.
#include "kernels/select/why_in_full.h"

#include <string>

#include "gtest/gtest.h"
#include "kernels/select/notice.h"
#include "kernels/select/selection_rule.h"

namespace kvstrata {
namespace {

Plan Parsed(const std::string& text) {
  auto plan = ParsePlan(text);
  EXPECT_TRUE(plan.ok()) << text << ": " << plan.status().ToString();
  return plan.ok() ? *plan : Plan();
}

TEST(WhyInFull, TheLengthComesBeforeThePromptAndThatBeforeTheBudget) {
  const Plan plan = Parsed("quest{min_tokens = 100}");
  EXPECT_EQ(WhyInFull(plan, 40, false), Say(Notice::kShort, {40, 100}));
  EXPECT_EQ(WhyInFull(plan, 40, true), Say(Notice::kShort, {40, 100}));
  EXPECT_EQ(WhyInFull(plan, 100, false), Say(Notice::kPromptOpen));
  EXPECT_TRUE(WhyInFull(plan, 100, true).starts_with("attends in full: what it always reads"));
  EXPECT_EQ(WhyInFull(plan, 1 << 20, true), "");
  EXPECT_EQ(WhyNotAtWork(plan, 100, true), "");
  EXPECT_EQ(WhyInFull(Parsed("full"), 1 << 20, true), Say(Notice::kReadsAll));
  const std::string most = std::to_string(kMostMinTokens);
  EXPECT_EQ(WhyInFull(Parsed("quest{min_tokens = " + most + "}"), 1 << 20, true),
            Say(Notice::kNeverPays, {kMostMinTokens}));
}

TEST(WhyInFull, OnlyVoteChoosesInAPrompt) {
  EXPECT_EQ(WhyInFull(Parsed("tokenselect{min_tokens = 0}"), 1 << 20, false), "");
  EXPECT_EQ(WhyInFull(Parsed("bits{min_tokens = 0}"), 1 << 20, false), Say(Notice::kPromptOpen));
}

TEST(WhyInFull, TheFigureOfABudgetIsWhereChoosingBegins) {
  for (const char* text : {"window{min_tokens = 0, n_sink = 4, n_recent = 60}",
                           "quest{min_tokens = 0, budget = 256}", "tokenselect{min_tokens = 0}",
                           "bits{min_tokens = 0, budget = 100}", "sentencekv{min_tokens = 0}"}) {
    const Plan plan = Parsed(text);
    const std::string why = WhyInFull(plan, 8, true);
    const size_t from = why.find("from ");
    ASSERT_NE(from, std::string::npos) << text << ": " << why;
    const int32_t tokens = std::stoi(why.substr(from + 5));
    EXPECT_GT(tokens, 8) << text;
    EXPECT_NE(WhyInFull(plan, tokens - 1, true), "") << text << ": " << why;
    EXPECT_EQ(WhyInFull(plan, tokens, true), "") << text << ": " << why;
  }
  EXPECT_EQ(WhyInFull(Parsed("window{min_tokens = 0, n_sink = 4, n_recent = 60}"), 40, true),
            Say(Notice::kWithinBudget, {40, 64}));
}

// As many as the queries ask for is no number that could hold all.
TEST(WhyInFull, MaxMissedHasNoBudget) {
  EXPECT_EQ(WhyInFull(Parsed("bits{min_tokens = 0, max_missed = 0.01}"), 4096, true), "");
}

}  // namespace
}  // namespace kvstrata
