// SPDX-License-Identifier: Apache-2.0
// What workers tell of their plans: sums by layer, what is refused, what metrics are made of.
#include "server/chunks/room/engine_recalls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>

#include "tests/server/chunks/room_driver.h"

namespace kvstrata {
namespace {

using chunks::RecalledLayer;
using testing::RecalledBytes;

constexpr std::string_view kPlans[] = {"full", "quest", "bits"};

TEST(EngineRecalls, LayersAddUpByTheirSamples) {
  EngineRecalls recalls(kPlans);
  const std::string plan = "quest{budget = 2048}";
  ASSERT_TRUE(
      recalls.Add("e", RecalledBytes(plan, {{7, 1, 1, 1, 0}, {2, 2, 0.5F, 0.25F, 9}})).ok());
  ASSERT_TRUE(recalls.Add("e", RecalledBytes(plan, {{7, 3, 0.5F, 0.5F, 4}})).ok());
  const std::vector<EngineRecall> engines = recalls.Engines();
  ASSERT_EQ(engines.size(), 1u);
  EXPECT_EQ(engines[0].engine + " " + engines[0].plan + " " + engines[0].model, "e " + plan + " m");
  ASSERT_EQ(engines[0].layers.size(), 2u);
  const LayerRecall &two = engines[0].layers[0], &seven = engines[0].layers[1];
  EXPECT_EQ(two.layer, 2u);
  EXPECT_EQ(two.samples, 2u);
  EXPECT_EQ(two.least, 0.25);
  EXPECT_EQ(seven.layer, 7u);
  EXPECT_EQ(seven.samples, 4u);
  EXPECT_DOUBLE_EQ(seven.recall, 0.625);
  EXPECT_DOUBLE_EQ(seven.error, 3);
  const LayerRecall all = engines[0].all();
  EXPECT_EQ(all.samples, 6u);
  EXPECT_DOUBLE_EQ(all.recall, 3.5 / 6);
  EXPECT_DOUBLE_EQ(all.error, 5);
  EXPECT_EQ(all.least, 0.25);
  EXPECT_EQ(engines[0].worst().layer, 2u);
}

TEST(EngineRecalls, AnotherPlanOrModelBeginsAnewAndAnEngineIsForgotten) {
  EngineRecalls recalls(kPlans);
  ASSERT_TRUE(recalls.Add("e", RecalledBytes("quest", {{1, 5, 1, 1, 0}})).ok());
  ASSERT_TRUE(recalls.Add("f", RecalledBytes("quest", {{1, 5, 1, 1, 0}})).ok());
  ASSERT_TRUE(recalls.Add("e", RecalledBytes("bits", {{0, 1, 0.5F, 0.5F, 0}})).ok());
  EXPECT_EQ(recalls.Engines()[0].all().samples, 1u);
  ASSERT_TRUE(recalls.Add("e", RecalledBytes("bits", {{0, 2, 1, 1, 0}}, "other")).ok());
  EXPECT_EQ(recalls.Engines()[0].all().samples, 2u);
  recalls.Forget("e");
  recalls.Forget("never was");
  ASSERT_EQ(recalls.Engines().size(), 1u);
  EXPECT_EQ(recalls.Engines()[0].engine, "f");
}

TEST(EngineRecalls, PlansAreToldApartByNameAndStayWhenEnginesGo) {
  EngineRecalls recalls(kPlans);
  ASSERT_TRUE(recalls.Add("e", RecalledBytes("quest{budget = 9}", {{1, 5, 1, 1, 0}})).ok());
  const std::vector<RecalledLayer> last = {{0, 1, 1, 1, 0}, {1, 3, 0.5F, 0.5F, 0}};
  ASSERT_TRUE(recalls.Add("f", RecalledBytes("quest", last)).ok());
  ASSERT_TRUE(recalls.Add("g", RecalledBytes("of my own", {{1, 2, 0.25F, 0, 0}})).ok());
  ASSERT_TRUE(recalls.Add("g", RecalledBytes("{selector = \"quest\"}", {{1, 2, 0.5F, 0, 0}})).ok());
  for (const char* engine : {"e", "f", "g"}) recalls.Forget(engine);
  const std::vector<PlanRecall> plans = recalls.Plans();
  ASSERT_EQ(plans.size(), 3u);  // `full` loses nothing
  EXPECT_EQ(plans[0].plan, "quest");
  EXPECT_EQ(plans[0].samples, 9u);
  EXPECT_DOUBLE_EQ(plans[0].recall, 0.625);
  EXPECT_EQ(plans[1].plan, "bits");
  EXPECT_EQ(plans[1].samples, 0u);
  EXPECT_EQ(plans[2].plan, "other");
  EXPECT_EQ(plans[2].samples, 4u);
  EXPECT_DOUBLE_EQ(plans[2].recall, 0.5);
}

TEST(EngineRecalls, WhatCannotBeIsRefusedAndNothingOfItCounts) {
  EngineRecalls recalls(kPlans);
  const RecalledLayer good{0, 1, 0.5F, 0.5F, 0.5F};
  const auto refused = [&](RecalledLayer row, const char* why) {
    const Status status = recalls.Add("e", RecalledBytes("quest", {good, row}));
    EXPECT_EQ(status.reason(), "CHUNK_PACKET");
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float x : {nan, infinity, -infinity, -0.001F, 1.001F}) {
    refused({1, 1, x, 0.5F, 0}, "recall");
    refused({1, 1, 0.5F, x, 0}, "least");
  }
  for (const float x : {nan, infinity, -infinity, -0.001F}) refused({1, 1, 1, 1, x}, "error");
  refused({1024, 1, 1, 1, 0}, "layer 1024");
  refused({1, 0, 1, 1, 0}, "0 samples");
  refused({1, (1U << 20) + 1, 1, 1, 0}, "1048577 samples");
  const auto malformed = [&](const std::vector<std::byte>& packet) {
    EXPECT_EQ(recalls.Add("e", packet).reason(), "CHUNK_PACKET") << packet.size();
  };
  malformed({});
  malformed(RecalledBytes("quest", {}));
  malformed(RecalledBytes("quest", std::vector(1025, good)));
  malformed(RecalledBytes("", {good}));
  std::vector<std::byte> packet = RecalledBytes("quest", {good});
  packet.push_back({});
  malformed(packet);
  packet.resize(packet.size() - 2);
  malformed(packet);
  for (const ptrdiff_t end : {8 + 128, 8 + 128 + 120}) {  // no NUL in plan, in model
    packet = RecalledBytes("quest", {good});
    std::fill(packet.begin() + (end == 8 + 128 ? 8 : 8 + 128), packet.begin() + end,
              std::byte{'x'});
    malformed(packet);
  }
  EXPECT_TRUE(recalls.Engines().empty());
  for (const PlanRecall& plan : recalls.Plans()) EXPECT_EQ(plan.samples, 0u);
  // The bounds themselves are in.
  const std::vector<RecalledLayer> bounds = {{1023, 1U << 20, 0, 0, 1e30F}, {0, 1, 1, 1, 0}};
  EXPECT_TRUE(recalls.Add("e", RecalledBytes("quest", bounds)).ok());
  EXPECT_TRUE(recalls.Add("e", RecalledBytes("quest", std::vector(1024, good))).ok());
}

TEST(EngineRecalls, NamesArePrintable) {
  EngineRecalls recalls(kPlans);
  ASSERT_TRUE(recalls.Add("e\x1b\xff", RecalledBytes("a\nplan", {{0, 1, 1, 1, 0}}, "\xc3")).ok());
  const EngineRecall told = recalls.Engines()[0];
  EXPECT_EQ(told.engine + "|" + told.plan + "|" + told.model, "e??|a?plan|?");
  recalls.Forget("e\x1b\xff");
  EXPECT_TRUE(recalls.Engines().empty());
}

TEST(EngineRecalls, AreReadWhileTheyAreTold) {
  EngineRecalls recalls(kPlans);
  std::atomic<bool> told = false;
  std::thread reader([&recalls, &told] {
    while (!told) {
      for (const EngineRecall& engine : recalls.Engines()) EXPECT_EQ(engine.all().recall, 1);
    }
  });
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(recalls.Add("e", RecalledBytes("quest", {{0, 1, 1, 1, 0}})).ok());
    if (i % 7 == 0) recalls.Forget("e");
  }
  told = true;
  reader.join();
}

}  // namespace
}  // namespace kvstrata
