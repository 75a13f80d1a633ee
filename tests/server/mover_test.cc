// SPDX-License-Identifier: Apache-2.0
// The mover's thread over a store: an open waits for nothing, its pages come to device behind it;
// the rate holds.
#include "server/work/mover.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using SteadyClock = std::chrono::steady_clock;

class MoverTest : public ::testing::Test {
 protected:
  // Leaves a prompt of 20 full pages on host, unused.
  void CacheOnHost(int32_t first) {
    TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(321, first));
    ASSERT_TRUE(store_->moves().Move(s.id(), Tier::kHost).ok());
    ASSERT_TRUE(s.Close().ok());
  }
  bool Eventually(const std::function<bool()>& holds) const {
    const auto end = SteadyClock::now() + std::chrono::seconds(30);
    while (!holds()) {
      if (SteadyClock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }
  uint64_t HostBytes(const TestSequence& s) const {
    return store_->inspection().Show(s.id())->info.host_bytes;
  }

  std::unique_ptr<Store> store_ = NewStore(SmallPools(256, 256));
  TestSession session_{store_.get()};
};

TEST_F(MoverTest, WhatASequenceOpenedOnComesToDevice) {
  CacheOnHost(0);
  const Mover mover({}, store_.get());
  TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(321));
  EXPECT_EQ(s.opened().held_tokens, 320u);
  s.ExpectIntact();
  EXPECT_TRUE(Eventually([&] { return HostBytes(s) == 0; }));
  EXPECT_GT(store_->inspection().Show(s.id())->info.version, 1u) << "another table names them";
  EXPECT_EQ(store_->inspection().Counters().promoted_pages, 20u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(MoverTest, ItRelievesAPoolAboveItsMark) {
  const Mover mover({}, store_.get());
  for (int32_t i = 0; i < 6; ++i) {
    TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(40 * 16 + 1, i * 10'000));
    ASSERT_TRUE(s.Close().ok());
  }
  EXPECT_TRUE(Eventually(
      [&] { return store_->inspection().Pools()[0].used_bytes <= 256 * 4096 / 100 * 90; }));
  EXPECT_TRUE(Eventually([&] { return store_->inspection().Counters().demoted_pages > 0; }));
  EXPECT_EQ(store_->inspection().Counters().evicted_pages, 0u);
}

TEST_F(MoverTest, ItWaitsBetweenPiecesAndEndsAllTheSame) {
  CacheOnHost(0);
  CacheOnHost(100'000);
  MoverOptions slow;
  slow.bytes_per_second = 1;  // the first piece is paid for in a day
  const Mover mover(slow, store_.get());
  TestSequence a = TestSequence::Prompt(&session_, "full", Tokens(321));
  EXPECT_TRUE(Eventually([&] { return HostBytes(a) == 0; }));
  TestSequence b = TestSequence::Prompt(&session_, "full", Tokens(321, 100'000));
  EXPECT_EQ(HostBytes(b), 20 * 4096u);
}

}  // namespace
}  // namespace kvstrata::testing
