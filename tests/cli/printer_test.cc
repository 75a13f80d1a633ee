// SPDX-License-Identifier: Apache-2.0
// Golden output of every form, the formats of columns, and the picture of pages.
#include "client/cli/printer.h"

#include <gtest/gtest.h>

#include <sstream>

#include "client/cli/list_fit.h"
#include "client/cli/page_grid.h"

namespace kvstrata::cli {
namespace {

constexpr Column kColumns[] = {
    {"NAME", "/name"}, {"USED", "/used", Bytes, true}, {"DIM", "/geometry/dim", nullptr, true}};

Json Document() {
  return {{"things",
           {{{"name", "llama"}, {"used", 1536}, {"geometry", {{"dim", 128}}}},
            {{"name", "a\x1b[31mb"}, {"used", 0}, {"geometry", {{"dim", 64}}}},
            {{"name", ""}, {"used", nullptr}}}}};
}

std::string List(Style style, const Json& document = Document()) {
  std::ostringstream out;
  PrintList(style, document, "things", kColumns, out);
  return out.str();
}

TEST(Printer, TableAlignsEscapesAndShowsWhatIsAbsent) {
  EXPECT_EQ(List({}),
            "NAME           USED  DIM\n"
            "llama       1.5 KiB  128\n"
            "a\\x1b[31mb      0 B   64\n"
            "-                 -    -\n");
}

TEST(Printer, NoHeadersLeavesTheRows) { EXPECT_EQ(List({.headers = false}).substr(0, 5), "llama"); }

TEST(Printer, AnEmptyListIsItsHeaders) {
  EXPECT_EQ(List({}, {{"things", Json::array()}}), "NAME  USED  DIM\n");
}

TEST(Printer, CsvHasTheDocumentsValues) {
  EXPECT_EQ(List({.format = Format::kCsv}, {{"things",
                                             {{{"name", "a, \"b\"\n"}, {"used", 1536}},
                                              {{"name", "c"}, {"geometry", {{"dim", 64}}}}}}}),
            "NAME,USED,DIM\n"
            "\"a, \"\"b\"\"\\x0a\",1536,\n"
            "c,,64\n");
  EXPECT_EQ(List({.format = Format::kCsv, .headers = false}).substr(0, 6), "llama,");
}

TEST(Printer, NameIsTheFirstColumn) {
  EXPECT_EQ(List({.format = Format::kName}), "llama\na\\x1b[31mb\n-\n");
  std::ostringstream out;
  PrintRecord({.format = Format::kName}, Document()["things"][0], kColumns, out);
  EXPECT_EQ(out.str(), "llama\n");
}

constexpr Column kRanked[] = {{"NAME", "/name"},
                              {"SIZE", "/size", nullptr, true, 2},
                              {"AGE", "/age", nullptr, true},
                              {"WHY", "/why", nullptr, false, 1, 8}};

std::string Ranked(size_t width, Format format = Format::kTable) {
  const Json document = {
      {"things", {{{"name", "llama"}, {"size", 1024}, {"age", 7}, {"why", "it was asked for"}}}}};
  std::ostringstream out;
  PrintList({format, true, width}, document, "things", kRanked, out);
  return out.str();
}

// Text is cut before a column goes; then the lowest rank goes first; the name stays.
TEST(Printer, ColumnsFallAwayByRank) {
  const std::string all =
      "NAME   SIZE  AGE  WHY\n"
      "llama  1024    7  it was asked for\n";
  EXPECT_EQ(Ranked(0), all);
  EXPECT_EQ(Ranked(34), all);
  EXPECT_EQ(Ranked(33),
            "NAME   SIZE  AGE  WHY\n"
            "llama  1024    7  it was asked...\n");
  EXPECT_EQ(Ranked(26),
            "NAME   SIZE  AGE  WHY\n"
            "llama  1024    7  it wa...\n");
  EXPECT_EQ(Ranked(25),
            "NAME   SIZE  WHY\n"
            "llama  1024  it was as...\n");
  EXPECT_EQ(Ranked(20),
            "NAME   SIZE\n"
            "llama  1024\n");
  EXPECT_EQ(Ranked(3), "NAME\nllama\n");
  EXPECT_EQ(Ranked(20, Format::kWide), all);
}

std::vector<std::string> LinesOf(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Three servers, as Kubernetes calls them, and why one of them is left alone.
constexpr Column kLong[] = {{"SERVERS", "/servers", nullptr, false, 0, 12},
                            {"SHARDS", "/shards", nullptr, true, 2},
                            {"ILLNESS", "/illness", nullptr, false, 3, 24},
                            {"READ", "/read", nullptr, true, 1}};

TEST(Printer, NoContentIsLongerThanTheLine) {
  std::string servers;
  for (int i = 0; i < 3; ++i) servers += "redis-0.redis.kv-cache.svc.cluster.local:6379,";
  const std::string illness = "server redis-0.redis.kv-cache.svc.cluster.local:6379: REDIS_CONNECT";
  const Json document = {
      {"things", {{{"servers", servers}, {"shards", 3}, {"illness", illness}, {"read", 12345}}}}};
  for (const size_t n : {size_t{1}, std::size(kLong)}) {
    const std::span<const Column> columns = std::span(kLong).first(n);
    for (size_t width = 8; width < 300; ++width) {
      std::ostringstream out;
      PrintList({Format::kTable, true, width}, document, "things", columns, out);
      const std::vector<std::string> lines = LinesOf(out.str());
      ASSERT_EQ(lines.size(), 2u);
      for (const std::string& line : lines) ASSERT_LE(Width(line), width) << line;
    }
  }
  std::ostringstream out;  // what ails it has the cells that are left, before what is known
  PrintList({Format::kTable, true, 80}, document, "things", kLong, out);
  const std::string row = LinesOf(out.str()).at(1);
  EXPECT_TRUE(row.starts_with("redis-0.r...  ")) << row;
  EXPECT_NE(row.find("server redis-0.redis.kv-cache.svc.cluster.local:...  12345"),
            std::string::npos)
      << row;
}

TEST(Printer, CutsBetweenCharacters) {
  EXPECT_EQ(Cut("\u00e4\u00f6\u00fc\u00df\u00e9\u00e8", 5), "\u00e4\u00f6...");
  EXPECT_EQ(Cut("\u00e4\u00f6\u00fc", 3), "\u00e4\u00f6\u00fc");
}

TEST(Printer, JsonIsTheDocument) {
  const std::string text = List({.format = Format::kJson});
  EXPECT_EQ(Json::parse(text), Document());
  EXPECT_EQ(text.substr(0, 18), "{\n  \"things\": [\n  ");
}

TEST(Printer, JsonSurvivesTextThatIsNotUtf8) {
  const std::string text = List({.format = Format::kJson}, {{"things", {{{"name", "\xff"}}}}});
  EXPECT_NE(text.find("\xEF\xBF\xBD"), std::string::npos);
}

TEST(Printer, YamlOfADocument) {
  const Json document = {{"version", "0.1.0"},
                         {"name", "quest"},
                         {"answer", "yes"},
                         {"text", "quest{budget = 1024}"},
                         {"line", "a\nb: c"},
                         {"empty", ""},
                         {"number", 1.5},
                         {"none", nullptr},
                         {"pools", {{{"tier", "device"}, {"shape", {1, 2}}}, {{"tier", "host"}}}},
                         {"nothing", Json::array()},
                         {"grid", {{1, 2}, {3}}}};
  EXPECT_EQ(ToYaml(document),
            "version: \"0.1.0\"\n"
            "name: quest\n"
            "answer: \"yes\"\n"
            "text: \"quest{budget = 1024}\"\n"
            "line: \"a\\nb: c\"\n"
            "empty: \"\"\n"
            "number: 1.5\n"
            "none: null\n"
            "pools:\n"
            "  - tier: device\n"
            "    shape:\n"
            "      - 1\n"
            "      - 2\n"
            "  - tier: host\n"
            "nothing: []\n"
            "grid:\n"
            "  -\n"
            "    - 1\n"
            "    - 2\n"
            "  -\n"
            "    - 3\n");
}

TEST(Printer, RecordIsOneLineAField) {
  std::ostringstream out;
  PrintRecord({}, Document()["things"][0], kColumns, out);
  EXPECT_EQ(out.str(), "NAME  llama\nUSED  1.5 KiB\nDIM   128\n");
}

TEST(Printer, RecordFoldsLongValuesBelowThemselves) {
  const Json document = {
      {"name", "one, two three four"}, {"used", 1536}, {"geometry", {{"dim", 1}}}};
  Style style;
  style.width = 23;
  std::ostringstream out;
  PrintRecord(style, document, kColumns, out);
  EXPECT_EQ(out.str(), "NAME  one, two three\n      four\nUSED  1.5 KiB\nDIM   1\n");
  for (const bool wide : {false, true}) {  // whole lines for programs
    if (wide) style.format = Format::kWide;
    if (!wide) style.headers = false;
    std::ostringstream whole;
    PrintRecord(style, document, kColumns, whole);
    EXPECT_NE(whole.str().find("one, two three four\n"), std::string::npos) << whole.str();
  }
}

TEST(Printer, WrapLosesNothingAndFits) {
  EXPECT_EQ(Wrap("", 4), std::vector<std::string>({""}));
  EXPECT_EQ(Wrap("abcd", 4), std::vector<std::string>({"abcd"}));
  EXPECT_EQ(Wrap("abcdefghi", 4), std::vector<std::string>({"abcd", "efgh", "i"}));
  EXPECT_EQ(Wrap("ab cd ef", 5), std::vector<std::string>({"ab cd", "ef"}));
  EXPECT_EQ(Wrap("a,b,c,d", 4), std::vector<std::string>({"a,b,", "c,d"}));
  EXPECT_EQ(Wrap("· ░ ▒", 3), std::vector<std::string>({"· ░", "▒"}));
  EXPECT_EQ(Wrap("ab abcdefgh", 4), std::vector<std::string>({"ab", "abcd", "efgh"}));
}

TEST(Printer, Formats) {
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(uint64_t{4} << 30), "4.0 GiB");
  EXPECT_EQ(Bytes(uint64_t{1} << 60), "1048576.0 TiB");
  EXPECT_EQ(Microseconds(999), "999us");
  EXPECT_EQ(Microseconds(1500), "1ms");
  EXPECT_EQ(Microseconds(192000000), "3m12s");
  EXPECT_EQ(Microseconds(7200000000), "2h");
  EXPECT_EQ(Microseconds(90061000000), "1d1h");
  EXPECT_EQ(Percent(0.5), "50.0 %");
  EXPECT_EQ(Fixed4(0.91235), "0.9123");
  EXPECT_EQ(Width("· ░"), 3u);
}

TEST(PageGrid, ShadesAreQuartersOfTheMost) {
  EXPECT_EQ(Shade(0, 8), 0);
  EXPECT_EQ(Shade(1, 8), 1);
  EXPECT_EQ(Shade(2, 8), 1);
  EXPECT_EQ(Shade(3, 8), 2);
  EXPECT_EQ(Shade(8, 8), 4);
  EXPECT_EQ(Shade(UINT32_MAX, UINT32_MAX), 4);
}

TEST(PageGrid, DrawsTiersAndShadesWithoutColour) {
  const std::vector<GridPage> pages = {
      {false, true, 0}, {false, false, 1}, {false, false, 4}, {true, false, 0}, {true, false, 4}};
  EXPECT_EQ(DrawGrid(pages, {.columns = 3, .page_tokens = 16}),
            "   token\n"
            "       0  ·░█\n"
            "      48  ∘●\n"
            "\n"
            "device ·░▒▓█  host   ∘○◔◑●   never .. up to 4 times selected\n"
            "5 pages: 3 device, 2 host, 1 shared, 2 never selected\n");
  const std::string plain = DrawGrid(pages, {.ascii = true, .columns = 8});
  EXPECT_EQ(plain.substr(0, 27), "    page\n       0  .14,d\n\nd");
  for (const char c : plain) EXPECT_LT(static_cast<unsigned char>(c), 0x80);
}

TEST(PageGrid, ColourOnlyWhenAsked) {
  const std::vector<GridPage> pages = {{false, false, 1}, {true, true, 1}};
  EXPECT_EQ(DrawGrid(pages, {.colour = false}).find('\x1b'), std::string::npos);
  EXPECT_NE(DrawGrid(pages, {.colour = true}).find("\x1b[33m\x1b[4m●\x1b[0m"), std::string::npos);
}

TEST(PageGrid, NoPagesIsNoRow) { EXPECT_NE(DrawGrid({}, {}).find("0 pages"), std::string::npos); }

}  // namespace
}  // namespace kvstrata::cli
