// SPDX-License-Identifier: Apache-2.0
// The frame of `kvstrata top`: strips, sorting and filtering, what fits where.
#include <gtest/gtest.h>

#include "client/cli/page_grid.h"
#include "client/cli/terminal.h"
#include "client/cli/top_view.h"

namespace kvstrata::cli {
namespace {

TEST(SelectionStripTest, ACellHasTheMostSelectedOfItsBuckets) {
  const std::vector<uint32_t> selected = {0, 0, 1, 100, 0, 50, 26, 25};
  EXPECT_EQ(SelectionStrip(selected, 8, true), "..14.221");
  EXPECT_EQ(SelectionStrip(selected, 4, true), ".422");
  EXPECT_EQ(SelectionStrip(selected, 3, true), ".42");
  EXPECT_EQ(SelectionStrip(selected, 8, false), "··░█·▒▒░");
  EXPECT_EQ(SelectionStrip(selected, 16, true), "....1144..222211");
  EXPECT_EQ(SelectionStrip(std::vector<uint32_t>{0, 0}, 4, true), "....");
  EXPECT_EQ(SelectionStrip({}, 4, true), "");
}

TEST(SelectionStripTest, AShareIsOfPagesLayersAndSteps) {
  EXPECT_EQ(SelectedShare(0, 100, 2, 0), 0);
  EXPECT_EQ(SelectedShare(50, 100, 2, 1), 0.25);
  EXPECT_EQ(SelectedShare(500, 100, 2, 1), 1);
}

TEST(ClipLineTest, ColoursTakeNoCellsAndEnd) {
  EXPECT_EQ(ClipLine("abcdef", 3), "abc");
  EXPECT_EQ(ClipLine("░▒▓█", 2), "░▒");
  EXPECT_EQ(ClipLine("\x1b[31mabcdef\x1b[0m", 3), "\x1b[31mabc\x1b[0m");
  EXPECT_EQ(ClipLine("\x1b[31mab\x1b[0mcdef", 3), "\x1b[31mab\x1b[0mc");
  EXPECT_EQ(ClipLine("ab\x1b[31", 3), "ab\x1b[31\x1b[0m");
  EXPECT_EQ(ClipLine("", 3), "");
  // What has room for it says that it was cut.
  EXPECT_EQ(ClipLine("abcdefgh", 8), "abcdefgh");
  EXPECT_EQ(ClipLine("abcdefghi", 8), "abcde...");
  EXPECT_EQ(ClipLine("\x1b[31mabcdefghi\x1b[0m", 8), "\x1b[31mabcde...\x1b[0m");
  EXPECT_EQ(ClipLine("\x1b[31mabcdefgh\x1b[0m", 8), "\x1b[31mabcdefgh\x1b[0m");
  EXPECT_EQ(ClipLine("░▒▓█░▒▓█░", 8), "░▒▓█░...");
}

TopView ViewOf(int rows) {
  TopView view;
  view.version = "1.2.3";
  view.health = "serving";
  view.seconds = 2;
  view.tiers = {{"device", 512, 1024, "cached 0 B"}, {"host", 0, 0, ""}};
  for (int i = 0; i < rows; ++i) {
    TopRow& row = view.rows.emplace_back();
    row.sequence = static_cast<uint64_t>(i + 1);
    row.plan = i % 2 == 0 ? "quest" : "a plan of a long name";
    row.client = "engine " + std::to_string(i);
    row.tokens = static_cast<uint32_t>(1000 - i);
    row.tokens_per_second = i;
    row.steps_per_second = 1;
    row.sampled = true;
    row.selected_share = 0.12;
    row.selected = {1, 0, 4};
  }
  return view;
}

TEST(TopViewTest, ArrangeSortsAndFilters) {
  std::vector<TopRow> rows = ViewOf(4).rows;
  Arrange(TopSort::kTokensPerSecond, "", &rows);
  EXPECT_EQ(rows[0].sequence, 4u);
  Arrange(TopSort::kTokens, "", &rows);
  EXPECT_EQ(rows[0].sequence, 1u);
  Arrange(TopSort::kSequence, "quest", &rows);
  ASSERT_EQ(rows.size(), 2u);
  Arrange(TopSort::kSequence, "engine 2", &rows);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].sequence, 3u);
}

TEST(TopFrameTest, NoLineOfTheTableIsWiderThanTheScreen) {
  const TopView view = ViewOf(5);
  for (const int columns : {80, 100, 140, 200}) {
    TopLook look;
    look.columns = columns;
    look.ascii = true;
    for (const std::string& line : TopTable(view, look)) {
      EXPECT_LE(Width(line), static_cast<size_t>(columns)) << line;
    }
    EXPECT_EQ(TopTable(view, look)[1].find("CLIENT") != std::string::npos, columns >= 100);
  }
}

TEST(TopFrameTest, RatesAreThereWholeOrNotAtAll) {
  TopView view = ViewOf(1);
  view.hit_share = view.kept_share = view.in_full_share = 0.5;
  TopLook look;
  for (look.columns = 40; look.columns < 120; ++look.columns) {
    const std::string rates = TopHeader(view, look)[1];
    EXPECT_LE(Width(rates), static_cast<size_t>(look.columns));
    EXPECT_TRUE(rates.ends_with("/s") || rates.ends_with("%")) << rates;
  }
}

TEST(TopFrameTest, LongNumbersOfSequencesAreWhole) {
  TopView view = ViewOf(2);
  view.rows[1].sequence = 1000000000002;
  TopLook look;
  look.marked = 0;
  const std::vector<std::string> lines = TopTable(view, look);
  EXPECT_NE(lines[3].find(" 1000000000002 "), std::string::npos) << lines[3];
  EXPECT_EQ(lines[1].find("PLAN"), lines[3].find("a plan"));
}

TEST(TopFrameTest, RowsFitBetweenTheHeaderAndTheKeys) {
  const TopView view = ViewOf(100);
  TopLook look;
  look.rows = 24;
  look.first = 90;
  look.marked = 95;
  const std::vector<std::string> lines = TopTable(view, look);
  EXPECT_EQ(TopHeader(view, look).size() + TopTableRoom(view, look) + 2 + 1, 24u);
  EXPECT_EQ(lines.size(), 2u + 10u);
  EXPECT_NE(lines[2].find(" 91 "), std::string::npos) << lines[2];
  EXPECT_EQ(lines[7][0], '>');
}

TEST(TopFrameTest, WhatNodesShareHasNoBar) {
  TopView view = ViewOf(0);
  view.tiers.push_back({"remote", 0, 0, "found 3  read 2"});
  const std::vector<std::string> lines = TopHeader(view, TopLook());
  EXPECT_EQ(lines.back(), "remote found 3  read 2");
  EXPECT_NE(lines[2].find('['), std::string::npos) << lines[2];
}

TEST(TopFrameTest, ChunksHaveABarAndALineOfRates) {
  TopView view = ViewOf(100);
  view.tiers.push_back({"chunks", 512, 1024, "leased 0 B  engines 2"});
  EXPECT_TRUE(ToJson(view).at("chunks").is_null());
  view.chunks = {.engines = 2, .hits = 12, .evicted = 0.5};
  TopLook look;
  look.rows = 24;
  const std::vector<std::string> lines = TopHeader(view, look);
  EXPECT_NE(lines[lines.size() - 2].find("engines 2"), std::string::npos);
  EXPECT_EQ(lines.back(),
            "       hits 12.0/s  misses 0.0/s  stored 0.0/s  read 0.0/s  evicted 0.5/s");
  EXPECT_EQ(lines.size() + TopTableRoom(view, look) + 2 + 1, 24u);
  EXPECT_EQ(ToJson(view).at("chunks").at("hits_per_second"), 12);
  for (look.columns = 20; look.columns < 100; ++look.columns) {
    EXPECT_LE(Width(TopHeader(view, look).back()), static_cast<size_t>(look.columns));
  }
}

TEST(TopFrameTest, EnginesHaveALineEachAndManyAreCounted) {
  TopView view = ViewOf(100);
  const size_t without = TopHeader(view, TopLook()).size();
  const TopEngine engine{
      "e\x1b of a name that is longer than others", "quest", "m", 4, 0.75, 0.5, 17};
  view.engines = std::vector(8, engine);
  TopLook look;
  look.rows = 40;
  EXPECT_EQ(TopHeader(view, look).size(), without + 8);
  EXPECT_EQ(TopHeader(view, look).back(),
            "       e\\x1b of a name that ...  recall 0.7500  worst layer 17: 0.5000  quest");
  view.engines.resize(11, engine);
  EXPECT_EQ(TopHeader(view, look).size(), without + 9);
  EXPECT_EQ(TopHeader(view, look).back(), "       3 more: kvstrata audit --engine");
  EXPECT_EQ(TopHeader(view, look).size() + TopTableRoom(view, look) + 2 + 1, 40u);
  view.engines.resize(1);
  for (look.columns = 20; look.columns < 100; ++look.columns) {
    EXPECT_LE(Width(TopHeader(view, look).back()), static_cast<size_t>(look.columns));
  }
  EXPECT_EQ(ToJson(view).at("engines").at(0).at("worst_layer"), 17);
}

TEST(TopFrameTest, TroubleAndNamesOfOthersAreSaid) {
  TopView view = ViewOf(1);
  view.rows[0].plan = "a\x1b[2Jb";
  TopLook look;
  look.trouble = "AWAY";
  EXPECT_NE(TopHeader(view, look)[0].find("AWAY"), std::string::npos);
  EXPECT_NE(TopTable(view, look)[2].find("a\\x1b[2Jb"), std::string::npos);
  view.rows[0].uncounted = "gpu";
  view.rows[0].in_full = "attends in full: 40 tokens are fewer";
  EXPECT_NE(TopTable(view, look)[2].find("attends in full: 40 tokens"), std::string::npos);
  view.rows[0].in_full.clear();
  EXPECT_NE(TopTable(view, look)[2].find("not counted on a GPU"), std::string::npos);
}

}  // namespace
}  // namespace kvstrata::cli
