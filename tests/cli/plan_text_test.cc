// SPDX-License-Identifier: Apache-2.0
// What a replay reads from plans' texts.
#include "client/cli/plan_text.h"

#include <gtest/gtest.h>

namespace kvstrata::cli {
namespace {

TEST(PlanText, OptionsByWholeName) {
  const char* text =
      "chess{codec = \"raw\", rho = [0.5, 0.2, 0.1], keep_rest = false, rest = \"mean\", "
      "parameters = \"a, rest = x}\", tree=true}";
  EXPECT_EQ(PlanOption(text, "codec"), "raw");
  EXPECT_EQ(PlanOption(text, "rho"), "[0.5, 0.2, 0.1]");
  EXPECT_EQ(PlanOption(text, "rest"), "mean");
  EXPECT_EQ(PlanOption(text, "keep_rest"), "false");
  EXPECT_EQ(PlanOption(text, "tree"), "true");
  EXPECT_EQ(PlanOption(text, "ho"), "");
  EXPECT_EQ(PlanOption("quest", "codec"), "");
  EXPECT_EQ(PlanOption("quest{", "codec"), "");
  EXPECT_EQ(PlanOption("", "codec"), "");
}

TEST(PlanText, WhatALogSumExpMayBeTrustedFor) {
  EXPECT_TRUE(AttendsPositionsOnly("full{codec = \"raw\"}"));
  EXPECT_TRUE(AttendsPositionsOnly("{codec = \"raw\", rest = \"drop\", tree = false}"));
  EXPECT_TRUE(AttendsPositionsOnly("sentencekv{codec = \"raw\", keep_rest = true}"));
  EXPECT_FALSE(AttendsPositionsOnly("quest{codec = \"raw\", rest = \"mean\"}"));
  EXPECT_FALSE(AttendsPositionsOnly("quest{codec = \"raw\", rest = \"mean\"}"));
  EXPECT_FALSE(AttendsPositionsOnly("chess{codec = \"raw\", rest = \"drop\", tree = true}"));
  EXPECT_FALSE(AttendsPositionsOnly("window{codec = \"raw\", compact = true}"));
  EXPECT_TRUE(AttendsPositionsOnly("window{codec = \"raw\", compact = false}"));
  EXPECT_FALSE(AttendsPositionsOnly("sekv{codec = \"lowrank\"}"));
  EXPECT_FALSE(AttendsPositionsOnly("mosaickv"));
  EXPECT_TRUE(StoresRaw("quest{codec = \"raw\", rest = \"mean\"}"));
  EXPECT_FALSE(StoresRaw("mosaickv{codec = \"packed\"}"));
}

}  // namespace
}  // namespace kvstrata::cli
