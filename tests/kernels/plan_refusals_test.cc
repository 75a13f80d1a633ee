// SPDX-License-Identifier: Apache-2.0
// Plans that are refused: with which code and reason, and that the message says what to do.
#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/plan/built_plans.h"
#include "kernels/plan/plan.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

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
  // A build without a plan says that before it looks at the plan's options.
  if (!(kHasSekv && kHasMosaicKv) && plan.status().reason() == "PLAN_UNIMPLEMENTED") GTEST_SKIP();
  EXPECT_EQ(plan.status().code(), bad.code) << plan.status().ToString();
  EXPECT_EQ(plan.status().reason(), bad.reason) << plan.status().ToString();
  for (const char* words : bad.says) EXPECT_THAT(plan.status().message(), HasSubstr(words));
}

constexpr Code kBadInput = Code::kInvalidArgument;

INSTANTIATE_TEST_SUITE_P(
    Names, Refused,
    ::testing::Values(
        Bad{"ches", kBadInput, "PLAN_UNKNOWN", {"'ches'", "did you mean 'chess'?", "full, window"}},
        Bad{"Quest", kBadInput, "PLAN_UNKNOWN", {"did you mean 'quest'?"}},
        Bad{"xylophone",
            kBadInput,
            "PLAN_UNKNOWN",
            {"full, window, quest, chess, tokenselect, sentencekv", "bits, strata"}},
        Bad{"bits2", kBadInput, "PLAN_UNKNOWN", {"did you mean 'bits'?"}},
        Bad{"planes", kBadInput, "PLAN_UNKNOWN", {"'planes' is the codec of preset 'strata'"}},
        Bad{"minmax", kBadInput, "PLAN_UNKNOWN", {"'minmax' is the selector of preset 'quest'"}},
        Bad{"quest{budgt = 3}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'budgt'", "did you mean 'budget'?", "n_recent, recent"}},
        Bad{"tokenselect{budgt = 3}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"did you mean 'budget'?", "k, budget, n_init, sinks"}},
        Bad{"tokenselect{unit = 3}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'unit'", "selector 'vote' over codec 'raw' does not read it"}},
        Bad{"tokenselect{max_missed = 0.01}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'max_missed'", "selector 'vote' over codec 'raw' does not read it"}},
        Bad{"bits{run = 6}", kBadInput, "PLAN_OPTION_INVALID", {"'run' = 6", "one of 1, 4, 8, 16"}},
        Bad{"strata{run = 8}", kBadInput, "PLAN_COMBINATION", {"'run'", "share above 0"}},
        Bad{"strata{share = 0.1, fine_above = 2}",
            kBadInput,
            "PLAN_COMBINATION",
            {"'fine_above'", "share = 0"}},
        Bad{"strata{hot = 8}", kBadInput, "PLAN_COMBINATION", {"'hot'", "lower = \"host\""}},
        Bad{"strata{unit = 40}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'unit' = 40", "a multiple of 16"}},
        Bad{"strata{max_loss = 0.1}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'max_loss'", "codec 'planes' does not read it"}},
        Bad{"quest{score = 'mean'}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'score'", "bounds", "deviation"}},
        Bad{"bits{max_missed = 0.75}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'max_missed' = 0.75", "0", "0.5"}},
        Bad{"bits{budget = 'most'}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'budget' = ", "most", "\"all\""}},
        Bad{"mosaickv{recent = 3}", kBadInput, "PLAN_OPTION_UNKNOWN", {"does not read it"}},
        Bad{"sekv{budget = 3}", kBadInput, "PLAN_OPTION_UNKNOWN", {"does not read it", "rows"}},
        Bad{"full{Page = 3}", kBadInput, "PLAN_OPTION_UNKNOWN", {"'Page'", "min_tokens"}},
        Bad{"window{budget = 3}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'budget'", "selector 'window' over codec 'raw' does not read it"}},
        Bad{"quest{keep = 3}", kBadInput, "PLAN_OPTION_UNKNOWN", {"does not read it"}},
        Bad{"mosaickv{n_recent = 3}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"selector 'block' over codec 'packed' does not read it"}},
        Bad{"sentencekv{codec = 'lowrank', pool = 3}", kBadInput, "PLAN_OPTION_UNKNOWN", {}},
        Bad{"full{compact = true}",
            kBadInput,
            "PLAN_OPTION_UNKNOWN",
            {"'compact'", "selector 'full' over codec 'raw' does not read it"}},
        Bad{"mosaickv{compact = true}",
            kBadInput,
            "PLAN_COMBINATION",
            {"'compact' = true", "codec = \"raw\""}},
        Bad{"quest{compact = true, rest = 'mean'}",
            kBadInput,
            "PLAN_COMBINATION",
            {"compact = true", "rest = \"mean\"", "use rest = \"drop\""}},
        Bad{"quest{min_tokens = \"often\"}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'min_tokens' = 'often'", "536870912", "\"auto\""}},
        Bad{"quest{batch = 8}", kBadInput, "PLAN_COMBINATION", {"'batch' = 8", "\"auto\""}},
        Bad{"quest{compact = 1}", kBadInput, "PLAN_OPTION_INVALID", {"'compact' = 1", "true or"}},
        Bad{"quest{tree = true}", kBadInput, "PLAN_OPTION_UNKNOWN", {"'tree'"}},
        Bad{"mosaickv{rest = 'mean'}", kBadInput, "PLAN_OPTION_UNKNOWN", {"'rest'"}},
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
        Bad{"quest{recent = 0}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'recent' = 0", "from 1 to 536870912"}},
        Bad{"quest{page = 16, unit = 16}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"'unit' is another word for 'page'", "use one of them"}},
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
        Bad{"chess{lists = \"page\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"head\""}},
        Bad{"chess{anchor = \"query\"}", kBadInput, "PLAN_COMBINATION", {"lists = \"layer\""}},
        Bad{"chess{trigger = \"often\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"entropy\""}},
        Bad{"chess{combine = \"xor\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"and\" or \"or\""}},
        Bad{"full{tier = \"tape\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"device\" or \"host\""}},
        Bad{"full{codec = \"zip\"}", kBadInput, "PLAN_OPTION_INVALID", {"raw, lowrank, packed"}},
        Bad{"tokenselect{theta = 1.5}", kBadInput, "PLAN_OPTION_INVALID", {"from -1 to 1"}},
        Bad{"tokenselect{theta = nan}", kBadInput, "PLAN_OPTION_INVALID", {"'theta'"}},
        Bad{"tokenselect{scale = 1}", kBadInput, "PLAN_OPTION_INVALID", {"true or false"}},
        Bad{"tokenselect{n_local = 0}", kBadInput, "PLAN_OPTION_INVALID", {"'n_local' = 0"}},
        Bad{"tokenselect{cosine = 'sum'}", kBadInput, "PLAN_OPTION_INVALID", {"\"head\""}},
        Bad{"sentencekv{r = 0}", kBadInput, "PLAN_OPTION_INVALID", {"above 0"}},
        Bad{"sentencekv{tau = 1.5}", kBadInput, "PLAN_OPTION_INVALID", {"an integer"}},
        Bad{"sekv{rows = -2}", kBadInput, "PLAN_OPTION_INVALID", {"from -1"}},
        Bad{"sekv{rows_share = 0}", kBadInput, "PLAN_OPTION_INVALID", {"'rows_share'"}},
        Bad{"sekv{parameters = '../x'}", kBadInput, "PLAN_OPTION_INVALID", {"a file's name"}},
        Bad{"sekv{parameters = '.x'}", kBadInput, "PLAN_OPTION_INVALID", {"'parameters'"}},
        Bad{"sekv{keep_raw = 'yes'}", kBadInput, "PLAN_OPTION_INVALID", {"\"auto\""}},
        Bad{"mosaickv{neighbours = 3}", kBadInput, "PLAN_OPTION_INVALID", {"one of 1, 2, 4"}},
        Bad{"mosaickv{block = 32}", kBadInput, "PLAN_OPTION_INVALID", {"one of 4, 8, 16"}},
        Bad{"mosaickv{closing = 'never'}", kBadInput, "PLAN_OPTION_INVALID", {"\"drift\""}},
        Bad{"quest{rest = 'some'}", kBadInput, "PLAN_OPTION_INVALID", {"\"drop\" or \"mean\""}}));

// A value that no code serves is refused as any unknown one, with those that exist.
INSTANTIATE_TEST_SUITE_P(
    UnknownValues, Refused,
    ::testing::Values(
        Bad{"quest{codec = \"fp8\"}",
            kBadInput,
            "PLAN_OPTION_INVALID",
            {"option 'codec' = 'fp8'", "raw, lowrank, packed"}},
        Bad{"mosaickv{codec = \"int4\"}", kBadInput, "PLAN_OPTION_INVALID", {"raw, lowrank"}},
        Bad{"chess{tier = \"disk\"}", kBadInput, "PLAN_OPTION_INVALID", {"'tier'", "\"host\""}},
        Bad{"full{tier = \"remote\"}", kBadInput, "PLAN_OPTION_INVALID", {"\"device\""}},
        Bad{"sekv{factors = 'disk'}", kBadInput, "PLAN_OPTION_INVALID", {"\"device\""}},
        Bad{"sekv{keep_raw = 'disk'}", kBadInput, "PLAN_OPTION_INVALID", {"\"host\""}}));

INSTANTIATE_TEST_SUITE_P(
    Combinations, Refused,
    ::testing::Values(
        Bad{"{segmenter = \"page\", selector = \"cascade\"}",
            kBadInput,
            "PLAN_COMBINATION",
            {"'cascade' cannot work with segmenter 'page'", "hierarchy", "leave 'segmenter' out"}},
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
        Bad{"mosaickv{segmenter = \"page\"}",
            kBadInput,
            "PLAN_COMBINATION",
            {"'block' cannot work with segmenter 'page'", "packed"}},
        Bad{"quest{codec = 'lowrank'}",
            kBadInput,
            "PLAN_COMBINATION",
            {"'minmax' cannot work over codec 'lowrank'", "'zoom' and 'bucket'"}},
        Bad{"chess{codec = 'lowrank'}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"tokenselect{codec = 'lowrank'}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"window{codec = 'lowrank'}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"full{codec = 'lowrank'}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"mosaickv{codec = 'lowrank'}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"sekv{codec = 'raw'}", kBadInput, "PLAN_COMBINATION", {"only codec 'lowrank'"}},
        Bad{"{selector = 'zoom', codec = 'packed'}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"sentencekv{codec = 'packed'}", kBadInput, "PLAN_COMBINATION", {"'lowrank'"}},
        Bad{"{selector = 'bucket', segmenter = 'page'}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"{selector = 'vote', segmenter = 'page'}",
            kBadInput,
            "PLAN_COMBINATION",
            {"serve nothing"}},
        Bad{"chess{tree = true}", kBadInput, "PLAN_COMBINATION", {"rest = \"mean\""}},
        Bad{"mosaickv{strategy = 'search', keep = 16}",
            kBadInput,
            "PLAN_COMBINATION",
            {"'keep' = 16", "strategy = \"fixed\""}},
        Bad{"mosaickv{max_block_loss = 0.1}", kBadInput, "PLAN_COMBINATION", {"\"search\""}},
        Bad{"mosaickv{drift = 2}", kBadInput, "PLAN_COMBINATION", {"closing = \"drift\""}},
        Bad{"mosaickv{closing = 'loss', drift = 2}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"mosaickv{closing = 'drift', close_loss = 2}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"mosaickv{closing = 'drift', min_segment = 4096, segment = 512}",
            kBadInput,
            "PLAN_COMBINATION",
            {"min_segment = 4096", "segment = 512"}},
        Bad{"mosaickv{buffer = 24}", kBadInput, "PLAN_COMBINATION", {"multiple of 16"}},
        Bad{"mosaickv{buffer = 256, segment = 128}", kBadInput, "PLAN_COMBINATION", {}},
        Bad{"mosaickv{keep = 30, neighbours = 4}",
            kBadInput,
            "PLAN_COMBINATION",
            {"keep = 30", "neighbours = 4"}},
        Bad{"mosaickv{keep = 200}", kBadInput, "PLAN_COMBINATION", {"192 channels"}},
        Bad{"sentencekv{tau = 536870912, r = 3}", kBadInput, "PLAN_COMBINATION", {"2^30"}},
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

TEST(Plan, WhatABuildLeavesOutIsRefusedByName) {
  const auto check = [](bool built, const std::string& option, const std::string& preset,
                        const std::vector<const char*>& texts) {
    EXPECT_EQ(std::ranges::count(PresetNames(), preset), built ? 1 : 0);
    for (const char* text : texts) {
      const Result<Plan> plan = ParsePlan(text);
      ASSERT_EQ(plan.ok(), built) << text;
      if (built) continue;
      EXPECT_EQ(plan.status().code(), Code::kUnimplemented);
      EXPECT_EQ(plan.status().reason(), "PLAN_UNIMPLEMENTED");
      EXPECT_THAT(plan.status().message(), HasSubstr(option + "=OFF"));
    }
  };
  check(kHasSekv, "KVS_PLAN_SEKV", "sekv", {"sekv{rows = 0}", "sentencekv{codec = 'lowrank'}"});
  check(kHasMosaicKv, "KVS_PLAN_MOSAICKV", "mosaickv",
        {"mosaickv{keep = 8}", "{selector = 'block', codec = 'raw'}", "quest{codec = 'packed'}"});
}

TEST(Plan, TooLongIsRefused) {
  const std::string deep = "quest{page = " + std::string(3000, '[') + "}";
  EXPECT_EQ(ParsePlan(deep).status().reason(), "PLAN_SYNTAX");
  EXPECT_EQ(ParsePlan(std::string(100000, 'q')).status().reason(), "PLAN_SYNTAX");
}

}  // namespace
}  // namespace kvstrata
