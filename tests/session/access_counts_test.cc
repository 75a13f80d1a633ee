// SPDX-License-Identifier: Apache-2.0
#include "session/access_counts.h"

#include "gtest/gtest.h"
#include "tests/session/published_tables.h"

namespace kvstrata::test {
namespace {

class AccessCountsTest : public ::testing::Test {
 protected:
  // Counters of the sequence from the fifth on, one for each of `pages`.
  std::unique_ptr<SessionSequence> Sequence(const std::string& plan, uint32_t pages) {
    published_.Publish(0, 9, pages);
    published_.table(0)->first_access_counter = 5;
    published_.table(0)->access_counter_count = pages;
    auto s = SequenceOf(0, 9, 16 * pages, plan);
    s->table = published_.reader().Read(0, 9);
    return s;
  }
  std::vector<uint32_t> Counts(size_t n) {
    return {published_.access_counters() + 5, published_.access_counters() + 5 + n};
  }
  static Selection Of(std::vector<std::vector<kvstrata::Run>> runs) {
    Selection selection;
    selection.full = false;
    selection.runs = std::move(runs);
    return selection;
  }

  PublishedTables published_;
  AccessCounts access_counts_{published_.header()};
};

TEST_F(AccessCountsTest, APageCountsOnceForAllHeadsAndRuns) {
  const auto s = Sequence("quest{min_tokens = 0}", 6);
  access_counts_.Count(*s, Of({{{0, 3}, {5, 17}, {20, 20}}, {{16, 32}, {79, 81}}}));
  EXPECT_EQ(Counts(6), (std::vector<uint32_t>{1, 1, 0, 0, 1, 1}));
  access_counts_.Count(*s, Of({{{0, 1}}}));
  EXPECT_EQ(Counts(6), (std::vector<uint32_t>{2, 1, 0, 0, 1, 1}));
  EXPECT_EQ(published_.access_counters()[4], 0u);
}

TEST_F(AccessCountsTest, PagesWithoutACounterAreNotCounted) {
  const auto s = Sequence("quest{min_tokens = 0}", 130);
  published_.table(0)->access_counter_count = 100;
  access_counts_.Count(*s, Of({{{15, 16 * 130}}}));
  std::vector<uint32_t> want(131, 0);
  std::fill_n(want.begin(), 100, 1u);
  EXPECT_EQ(Counts(131), want);
}

TEST_F(AccessCountsTest, PlanFullAndTablesWithoutCountersCountNothing) {
  const auto full = Sequence("full", 4);
  access_counts_.Count(*full, Of({{{0, 64}}}));
  const auto s = Sequence("quest{min_tokens = 0}", 4);
  published_.table(0)->access_counter_count = 0;
  access_counts_.Count(*s, Of({{{0, 64}}}));
  published_.table(0)->access_counter_count = 4;
  published_.table(0)->first_access_counter = shm::kAccessCounters - 3;  // beyond the segment
  access_counts_.Count(*s, Of({{{0, 64}}}));
  EXPECT_EQ(Counts(4), (std::vector<uint32_t>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace kvstrata::test
