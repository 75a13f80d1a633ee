#include "kernels/plan.h"

#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

Plan MustParse(std::string_view text) {
  const Result<Plan> plan = ParsePlan(text);
  EXPECT_TRUE(plan.ok()) << text << ": " << plan.status().ToString();
  return plan.ok() ? *plan : Plan();
}

TEST(Plan, PresetsHaveTheDefaultsOfTheSpecification) {
  const Plan full = MustParse("full");
  EXPECT_EQ(full, Plan());
  const Plan window = MustParse("window");
  EXPECT_EQ(window.selector, SelectorKind::kWindow);
  EXPECT_EQ(window.segmenter, SegmenterKind::kNone);
  EXPECT_EQ(window.n_sink, 4);
  EXPECT_EQ(window.n_recent, 2044);
  EXPECT_EQ(window.min_tokens, 4096);
  const Plan quest = MustParse("quest");
  EXPECT_EQ(quest.selector, SelectorKind::kMinMax);
  EXPECT_EQ(quest.segmenter, SegmenterKind::kPage);
  EXPECT_EQ(quest.page, 16);
  EXPECT_EQ(quest.budget, 2048);
  EXPECT_EQ(quest.n_sink, 0);
  EXPECT_EQ(quest.n_recent, 1);
  const Plan chess = MustParse("chess");
  EXPECT_EQ(chess.selector, SelectorKind::kCascade);
  EXPECT_EQ(chess.segmenter, SegmenterKind::kHierarchy);
  EXPECT_EQ(chess.page, 32);
  EXPECT_EQ(chess.pages_per_chunk, 8);
  EXPECT_EQ(chess.chunks_per_grid, 8);
  EXPECT_EQ(chess.window, 16);
  EXPECT_EQ(chess.sinks, 1);
  EXPECT_EQ(chess.rho, (std::array<double, 3>{0.5, 0.2, 0.1}));
  EXPECT_EQ(chess.cascade, Plan::Cascade::kTop);
  EXPECT_EQ(chess.trigger, Plan::Trigger::kEntropy);
  EXPECT_FALSE(chess.trigger_or);
  EXPECT_EQ(chess.thresholds, (std::array<double, 2>{kInf, kInf}));
  EXPECT_EQ(chess.every, 10);
}

TEST(Plan, OptionsAreSet) {
  const Plan quest = MustParse(
      "  quest { budget = 1024, page=32,\tn_sink = 20, n_recent = 30, min_tokens = 0, "
      "n_dense_layers = 2, tier = \"host\", codec = 'raw' } ");
  EXPECT_EQ(quest.name, "quest");
  EXPECT_EQ(quest.budget, 1024);
  EXPECT_EQ(quest.page, 32);
  EXPECT_EQ(quest.n_sink, 20);
  EXPECT_EQ(quest.n_recent, 30);
  EXPECT_EQ(quest.min_tokens, 0);
  EXPECT_EQ(quest.n_dense_layers, 2);
  EXPECT_EQ(quest.tier, TierKind::kHost);
  const Plan chess = MustParse(
      "chess{page=8,pages_per_chunk=3,chunks_per_grid=4,sinks=2,window=5,rho=[1,0.6,5e-1],"
      "cascade=\"literal\",trigger=\"always\",combine=\"or\",thresholds=[0.9,inf],every=7}");
  EXPECT_EQ(chess.page, 8);
  EXPECT_EQ(chess.pages_per_chunk, 3);
  EXPECT_EQ(chess.chunks_per_grid, 4);
  EXPECT_EQ(chess.sinks, 2);
  EXPECT_EQ(chess.window, 5);
  EXPECT_EQ(chess.rho, (std::array<double, 3>{1, 0.6, 0.5}));
  EXPECT_EQ(chess.cascade, Plan::Cascade::kLiteral);
  EXPECT_EQ(chess.trigger, Plan::Trigger::kAlways);
  EXPECT_TRUE(chess.trigger_or);
  EXPECT_EQ(chess.thresholds, (std::array<double, 2>{0.9, kInf}));
  EXPECT_EQ(chess.every, 7);
  EXPECT_EQ(MustParse("chess{rho=\"moderate\"}").rho, (std::array<double, 3>{0.8, 0.7, 0.7}));
  EXPECT_EQ(MustParse("chess{rho=\"conservative\"}").rho, (std::array<double, 3>{0.9, 0.9, 0.9}));
  EXPECT_EQ(MustParse("quest{}"), MustParse("quest"));
}

TEST(Plan, OwnPlansNameTheirAxes) {
  Plan expected = MustParse("chess{rho = [0.3, 0.3, 0.3]}");
  expected.name = "custom";
  EXPECT_EQ(MustParse("{segmenter = \"hierarchy\", selector = \"cascade\", rho = [0.3, 0.3, 0.3]}"),
            expected);
  EXPECT_EQ(MustParse("{selector = \"cascade\", rho = [0.3, 0.3, 0.3]}"), expected);
  EXPECT_EQ(MustParse("quest{selector = \"minmax\", segmenter = \"page\"}"), MustParse("quest"));
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int32_t Int(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(engine_);
  }
  double Share() { return 1 - std::uniform_real_distribution<double>(0, 1)(engine_); }  // (0, 1]
  bool Coin() { return Int(0, 1) == 1; }

 private:
  std::mt19937_64 engine_;
};

Plan RandomPlan(Random& r) {
  const auto names = PresetNames();
  Plan p = MustParse(names[r.Int(0, static_cast<int>(names.size()) - 1)]);
  if (r.Coin()) p.name = "custom";
  p.tier = r.Coin() ? TierKind::kHost : TierKind::kDevice;
  p.min_tokens = r.Int(0, 1 << 29);
  p.n_dense_layers = r.Int(0, 512);
  if (p.selector == SelectorKind::kWindow || p.selector == SelectorKind::kMinMax) {
    p.n_sink = r.Int(0, 1 << 29);
    p.n_recent = r.Int(1, 1 << 29);
  }
  if (p.selector == SelectorKind::kMinMax) {
    p.page = r.Int(1, 1024);
    p.budget = r.Int(0, 1 << 29);
  }
  if (p.selector != SelectorKind::kCascade) return p;
  p.page = r.Int(1, 64);
  p.pages_per_chunk = r.Int(1, 32);
  p.chunks_per_grid = r.Int(1, 32);
  p.sinks = r.Int(0, 1 << 19);
  p.window = r.Int(1, 1 << 19);
  p.rho = {r.Share(), r.Share(), r.Share()};
  p.cascade = r.Coin() ? Plan::Cascade::kLiteral : Plan::Cascade::kTop;
  p.trigger = static_cast<Plan::Trigger>(r.Int(0, 2));
  p.trigger_or = r.Coin();
  p.thresholds = {r.Coin() ? kInf : r.Share() * 1e-7, r.Coin() ? 0 : r.Share() * 1e20};
  p.every = r.Int(1, 1 << 19);
  return p;
}

TEST(Plan, WhatFormatWritesParseReads) {
  constexpr uint64_t kSeed = 11;
  RecordProperty("seed", kSeed);
  Random random(kSeed);
  for (int i = 0; i < 2000; ++i) {
    const Plan plan = RandomPlan(random);
    const std::string text = FormatPlan(plan);
    const Result<Plan> again = ParsePlan(text);
    ASSERT_TRUE(again.ok()) << "seed " << kSeed << " plan " << i << ": " << text << ": "
                            << again.status().ToString();
    ASSERT_EQ(*again, plan) << "seed " << kSeed << " plan " << i << ": " << text;
    ASSERT_EQ(text.find('\n'), std::string::npos);
  }
}

TEST(Plan, FormatWritesEveryOption) {
  EXPECT_EQ(FormatPlan(MustParse("quest")),
            "quest{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
            "n_sink = 0, n_recent = 1, page = 16, budget = 2048}");
  EXPECT_THAT(FormatPlan(MustParse("chess")), HasSubstr("thresholds = [inf, inf]"));
  EXPECT_THAT(FormatPlan(MustParse("{selector = \"full\"}")),
              HasSubstr("{segmenter = \"none\", selector = \"full\", "));
}

struct Bad {
  const char* text;
  Code code;
  const char* reason;
  std::vector<const char*> says;
};

class Refused : public ::testing::TestWithParam<Bad> {};

TEST_P(Refused, WithCodeReasonAndWhatToDo) {
  const Bad& bad = GetParam();
  const Result<Plan> plan = ParsePlan(bad.text);
  ASSERT_FALSE(plan.ok()) << bad.text;
  EXPECT_EQ(plan.status().code(), bad.code) << plan.status().ToString();
  EXPECT_EQ(plan.status().reason(), bad.reason) << plan.status().ToString();
  for (const char* words : bad.says) EXPECT_THAT(plan.status().message(), HasSubstr(words));
}

constexpr Code kBadInput = Code::kInvalidArgument;
constexpr Code kNotYet = Code::kUnimplemented;

INSTANTIATE_TEST_SUITE_P(
    Names, Refused,
    ::testing::Values(
        Bad{"ches", kBadInput, "PLAN_UNKNOWN", {"'ches'", "did you mean 'chess'?", "full, window"}},
        Bad{"Quest", kBadInput, "PLAN_UNKNOWN", {"did you mean 'quest'?"}},
        Bad{"xylophone", kBadInput, "PLAN_UNKNOWN", {"full, window, quest, chess"}},
        Bad{"quest{budgt = 3}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'budgt'", "did you mean 'budget'?", "n_recent"}},
        Bad{"full{Page = 3}", kBadInput, "PLAN_OPTION_UNKNOWN", {"'Page'", "min_tokens"}},
        Bad{"window{budget = 3}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'budget'", "'window' does not read it"}},
        Bad{"{selector = \"cascad\"}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'selector'", "did you mean 'cascade'?"}},
        Bad{"{segmenter = \"pages\", selector = \"minmax\"}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'segmenter'", "did you mean 'page'?"}},
        Bad{"{segmenter = \"page\"}", kBadInput, "PLAN_OPTION_INVALID", {"'selector' is missing"}},
        Bad{"{selector = 3}", kBadInput, "PLAN_OPTION_INVALID", {"'selector' = 3"}}));

INSTANTIATE_TEST_SUITE_P(
    Values, Refused,
    ::testing::Values(
        Bad{"quest{page = 0}", kBadInput, "PLAN_OPTION_INVALID", {"'page' = 0", "from 1 to 1024"}},
        Bad{"quest{page = 16.0}", kBadInput, "PLAN_OPTION_INVALID", {"'page'", "an integer"}},
        Bad{"quest{page = \"16\"}", kBadInput, "PLAN_OPTION_INVALID", {"'page'", "an integer"}},
        Bad{"quest{page = true}", kBadInput, "PLAN_OPTION_INVALID", {"'page' = true"}},
        Bad{"quest{budget = -1}", kBadInput, "PLAN_OPTION_INVALID", {"'budget' = -1"}},
        Bad{"quest{budget = 9223372036854775807}", kBadInput, "PLAN_OPTION_INVALID", {"'budget'"}},
        Bad{"quest{n_recent = 0}", kBadInput, "PLAN_OPTION_INVALID", {"'n_recent' = 0"}},
        Bad{"full{min_tokens = 4294967296}", kBadInput, "PLAN_OPTION_INVALID", {"536870912"}},
        Bad{"chess{window = 0}", kBadInput, "PLAN_OPTION_INVALID", {"'window' = 0"}},
        Bad{"chess{rho = [0.5, 0.2]}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'rho'", "three numbers"}},
        Bad{"chess{rho = [0.5, 0.2, 0]}", kBadInput, "PLAN_OPTION_INVALID", {"above 0"}},
        Bad{"chess{rho = [0.5, 0.2, 1.1]}", kBadInput, "PLAN_OPTION_INVALID", {"at most 1"}},
        Bad{"chess{rho = [0.5, 0.2, nan]}", kBadInput, "PLAN_OPTION_INVALID", {"'rho'"}},
        Bad{"chess{rho = [0.5, 0.2, \"x\"]}", kBadInput, "PLAN_OPTION_INVALID", {"'rho'"}},
        Bad{"chess{rho = \"brave\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"moderate\""}},
        Bad{"chess{thresholds = [0.5, -1]}", kBadInput, "PLAN_OPTION_INVALID", {"from 0 to inf"}},
        Bad{"chess{thresholds = [nan, 1]}", kBadInput, "PLAN_OPTION_INVALID", {"'thresholds'"}},
        Bad{"chess{cascade = \"both\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"literal\""}},
        Bad{"chess{trigger = \"often\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"entropy\""}},
        Bad{"chess{combine = \"xor\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"and\" or \"or\""}},
        Bad{"full{tier = \"tape\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"device\" or \"host\""}},
        Bad{"full{codec = \"zip\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"raw\""}}));

INSTANTIATE_TEST_SUITE_P(
    NotYet, Refused,
    ::testing::Values(
        Bad{"tokenselect", kNotYet, "PLAN_UNIMPLEMENTED", {"'tokenselect'", "this build has full"}},
        Bad{"sentencekv{tau = 3}", kNotYet, "PLAN_UNIMPLEMENTED", {}},
        Bad{"sekv", kNotYet, "PLAN_UNIMPLEMENTED", {}},
        Bad{"mosaickv", kNotYet, "PLAN_UNIMPLEMENTED", {}},
        Bad{"strata", kNotYet, "PLAN_UNIMPLEMENTED", {}},
        Bad{"{selector = \"vote\"}", kNotYet, "PLAN_UNIMPLEMENTED", {"selector 'vote'"}},
        Bad{"{selector = \"full\", segmenter = \"span\"}", kNotYet, "PLAN_UNIMPLEMENTED", {}},
        Bad{"quest{codec = \"packed\"}", kNotYet, "PLAN_UNIMPLEMENTED", {"codec", "packed"}},
        Bad{"chess{codec = \"lowrank\"}", kNotYet, "PLAN_UNIMPLEMENTED", {"codec"}},
        Bad{"chess{tier = \"disk\"}", kNotYet, "PLAN_UNIMPLEMENTED", {"tier", "\"host\""}},
        Bad{"full{tier = \"remote\"}", kNotYet, "PLAN_UNIMPLEMENTED", {}},
        Bad{"quest{rest = \"mean\"}", kNotYet, "PLAN_UNIMPLEMENTED", {"'rest'"}}));

INSTANTIATE_TEST_SUITE_P(
    Combinations, Refused,
    ::testing::Values(
        Bad{"{segmenter = \"page\", selector = \"cascade\"}",
            kBadInput,
            "PLAN_COMBINATION",
            {"'cascade' cannot work with segmenter 'page'", "hierarchy"}},
        Bad{"{segmenter = \"none\", selector = \"cascade\"}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"{segmenter = \"none\", selector = \"minmax\"}",
            kBadInput,
            "PLAN_COMBINATION",
            {"minimum and maximum"}},
        Bad{"{segmenter = \"hierarchy\", selector = \"minmax\"}",
            kBadInput,
            "PLAN_COMBINATION",
            {}},
        Bad{"{segmenter = \"page\", selector = \"window\"}",
            kBadInput,
            "PLAN_COMBINATION",
            {"serve nothing"}},
        Bad{"quest{selector = \"cascade\"}",
            kBadInput,
            "PLAN_COMBINATION",
            {"leave out the preset's name"}},
        Bad{"chess{segmenter = \"page\"}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"chess{page = 1024, pages_per_chunk = 64}",
            kBadInput,
            "PLAN_COMBINATION",
            {"524288 tokens", "at most 65536"}}));

INSTANTIATE_TEST_SUITE_P(
    Syntax, Refused,
    ::testing::Values(
        Bad{"", kBadInput, "PLAN_SYNTAX", {"empty"}},
        Bad{"  \t", kBadInput, "PLAN_SYNTAX", {"empty"}},
        Bad{"quest{budget = 3", kBadInput, "PLAN_SYNTAX", {"without '}'"}},
        Bad{"quest{budget}", kBadInput, "PLAN_SYNTAX", {"column"}},
        Bad{"quest{page = 1, page = 2}", kBadInput, "PLAN_SYNTAX", {}},
        Bad{"quest{page = 1} {page = 2}", kBadInput, "PLAN_SYNTAX", {}},
        Bad{"quest{page = 1}\nplan.page = {}", kBadInput, "PLAN_SYNTAX", {"one line"}},
        Bad{"quest{page = 1} # }", kBadInput, "PLAN_SYNTAX", {"comment"}},
        Bad{"{", kBadInput, "PLAN_SYNTAX", {}}, Bad{"}", kBadInput, "PLAN_UNKNOWN", {}}));

TEST(Plan, TooLongIsRefused) {
  const std::string deep = "quest{page = " + std::string(3000, '[') + "}";
  EXPECT_EQ(ParsePlan(deep).status().reason(), "PLAN_SYNTAX");
  EXPECT_EQ(ParsePlan(std::string(100000, 'q')).status().reason(), "PLAN_SYNTAX");
}

TEST(Plan, EveryPresetIsDescribedAndParses) {
  EXPECT_THAT(PresetNames(), ::testing::ElementsAre("full", "window", "quest", "chess"));
  for (const std::string_view name : PresetNames()) {
    EXPECT_FALSE(DescribePreset(name).empty()) << name;
    EXPECT_EQ(MustParse(name).name, name);
  }
  EXPECT_TRUE(DescribePreset("nobody").empty());
}

TEST(Plan, IndexFollowsTheSegmenter) {
  const Geometry g{.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  EXPECT_EQ(IndexOf(MustParse("full"), g).kind, IndexLayout::Kind::kNone);
  EXPECT_EQ(IndexOf(MustParse("window"), g).kind, IndexLayout::Kind::kNone);
  const IndexLayout quest = IndexOf(MustParse("quest{page = 8}"), g);
  EXPECT_EQ(quest.kind, IndexLayout::Kind::kMinMax);
  EXPECT_EQ(quest.levels[0].unit_tokens, 8);
  const IndexLayout chess =
      IndexOf(MustParse("chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 5}"), g);
  EXPECT_EQ(chess.kind, IndexLayout::Kind::kMean);
  ASSERT_EQ(chess.level_count, 3);
  EXPECT_EQ(chess.levels[0].unit_tokens, 8);
  EXPECT_EQ(chess.levels[1].unit_tokens, 24);
  EXPECT_EQ(chess.levels[2].unit_tokens, 120);
  EXPECT_EQ(chess.block_tokens % 120, 0);
}

}  // namespace
}  // namespace kvstrata
