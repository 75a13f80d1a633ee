#include "session/page_heat.h"

#include "gtest/gtest.h"
#include "tests/session/published_tables.h"

namespace kvstrata::test {
namespace {

class PageHeatTest : public ::testing::Test {
 protected:
  // Counters of the sequence from the fifth on, one for each of `pages`.
  std::unique_ptr<SessionSequence> Sequence(const std::string& plan, uint32_t pages) {
    published_.Publish(0, 9, pages);
    published_.table(0)->heat_first = 5;
    published_.table(0)->heat_count = pages;
    auto s = SequenceOf(0, 9, 16 * pages, plan);
    s->table = published_.reader().Read(0, 9);
    return s;
  }
  std::vector<uint32_t> Heat(size_t n) {
    return {published_.heat() + 5, published_.heat() + 5 + n};
  }
  static Selection Of(std::vector<std::vector<kvstrata::Run>> runs) {
    Selection selection;
    selection.full = false;
    selection.runs = std::move(runs);
    return selection;
  }

  PublishedTables published_;
  PageHeat heat_{published_.header()};
};

TEST_F(PageHeatTest, APageCountsOnceForAllHeadsAndRuns) {
  const auto s = Sequence("quest{min_tokens = 0}", 6);
  heat_.Count(*s, Of({{{0, 3}, {5, 17}, {20, 20}}, {{16, 32}, {79, 81}}}));
  EXPECT_EQ(Heat(6), (std::vector<uint32_t>{1, 1, 0, 0, 1, 1}));
  heat_.Count(*s, Of({{{0, 1}}}));
  EXPECT_EQ(Heat(6), (std::vector<uint32_t>{2, 1, 0, 0, 1, 1}));
  EXPECT_EQ(published_.heat()[4], 0u);
}

TEST_F(PageHeatTest, PagesWithoutACounterAreNotCounted) {
  const auto s = Sequence("quest{min_tokens = 0}", 130);
  published_.table(0)->heat_count = 100;
  heat_.Count(*s, Of({{{15, 16 * 130}}}));
  std::vector<uint32_t> want(131, 0);
  std::fill_n(want.begin(), 100, 1u);
  EXPECT_EQ(Heat(131), want);
}

TEST_F(PageHeatTest, PlanFullAndTablesWithoutCountersCountNothing) {
  const auto full = Sequence("full", 4);
  heat_.Count(*full, Of({{{0, 64}}}));
  const auto s = Sequence("quest{min_tokens = 0}", 4);
  published_.table(0)->heat_count = 0;
  heat_.Count(*s, Of({{{0, 64}}}));
  published_.table(0)->heat_count = 4;
  published_.table(0)->heat_first = shm::kHeatEntries - 3;  // beyond the segment
  heat_.Count(*s, Of({{{0, 64}}}));
  EXPECT_EQ(Heat(4), (std::vector<uint32_t>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace kvstrata::test
