// SPDX-License-Identifier: Apache-2.0
// What moves in the background, and what does not: marks, demotion before eviction, promotion of
// what sequences opened on, capacities that change, and what selectors chose.
#include <gtest/gtest.h>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMiB = uint64_t{1} << 20;

class WatermarksTest : public ::testing::Test {
 protected:
  // Pools of these capacities in pages; arenas of 32.
  void Start(uint64_t device, uint64_t host) {
    StoreOptions options = SmallPools(device, host);
    options.high_percent = 75;
    options.low_percent = 50;
    store_ = NewStore(options);
    store_->moves().SetMoveSink([this] { ++wakes_; });
    session_ = std::make_unique<TestSession>(store_.get());
  }
  // Leaves a prompt of `pages` full pages cached.
  void Cache(int32_t pages, int32_t first, std::string_view plan = "full") {
    TestSequence s = TestSequence::Prompt(session_.get(), plan, Tokens(pages * 16 + 1, first));
    ASSERT_TRUE(s.Close().ok());
  }
  uint32_t Held(int32_t pages, int32_t first, Tier tier) {
    const std::vector<int32_t> tokens = Tokens(pages * 16 + 1, first);
    const Result<PrefixHit> hit =
        store_->lookups().Lookup(session_->id(), session_->model(), tokens);
    EXPECT_TRUE(hit.ok());
    return hit->tokens_in(tier) / 16;
  }
  PoolInfo Pool(Tier tier) const { return store_->inspection().Pools()[static_cast<size_t>(tier)]; }
  uint64_t MoveAll(uint64_t piece = 4 * kPage) {
    uint64_t moved = 0;
    for (auto bytes = store_->moves().MoveSome(piece); bytes;
         bytes = store_->moves().MoveSome(piece)) {
      EXPECT_LE(*bytes, piece);
      moved += *bytes;
      ExpectClean(*store_);
    }
    return moved;
  }

  uint64_t wakes_ = 0;
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

TEST_F(WatermarksTest, NothingMovesBelowTheHighMark) {
  Start(128, 128);
  Cache(90, 0);  // the mark is at 96
  EXPECT_EQ(wakes_, 0u);
  EXPECT_EQ(MoveAll(), 0u);
  EXPECT_EQ(Held(90, 0, Tier::kDevice), 90u);
}

TEST_F(WatermarksTest, AboveItTheOldestGoToHostUntilTheLowMark) {
  Start(128, 128);
  Cache(40, 0);
  Cache(60, 100'000);
  EXPECT_GT(wakes_, 0u);
  EXPECT_GT(MoveAll(), 0u);
  EXPECT_LE(Pool(Tier::kDevice).used_bytes, 64 * kPage);
  EXPECT_GT(Pool(Tier::kDevice).used_bytes, 60 * kPage);
  EXPECT_EQ(Held(60, 100'000, Tier::kDevice), 60u) << "the younger ones";
  EXPECT_EQ(Held(40, 0, Tier::kHost) + Held(40, 0, Tier::kDevice), 40u) << "nothing is lost";
  EXPECT_EQ(store_->inspection().Counters().evicted_pages, 0u);
  EXPECT_EQ(store_->inspection().Counters().demoted_pages, Pool(Tier::kHost).cached_bytes / kPage);
  // Held again, it has the bytes that were written.
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(40 * 16 + 1));
  EXPECT_EQ(s.opened().held_tokens, 640u);
  s.ExpectIntact();
}

TEST_F(WatermarksTest, MarksThatAreLoweredAreKept) {
  Start(128, 128);
  Cache(90, 0);  // the mark is at 96
  EXPECT_EQ(MoveAll(), 0u);
  StoreSettings settings;
  settings.high_percent = 40;
  settings.low_percent = 25;
  store_->Apply(settings);
  EXPECT_EQ(wakes_, 1u);
  EXPECT_GT(MoveAll(), 0u);
  EXPECT_LE(Pool(Tier::kDevice).used_bytes, 32 * kPage);
}

TEST_F(WatermarksTest, WhatIsInUseStays) {
  Start(128, 128);
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100 * 16 + 1));
  EXPECT_GT(wakes_, 0u);
  EXPECT_EQ(MoveAll(), 0u);
  EXPECT_EQ(Pool(Tier::kHost).used_bytes, 0u);
  s.ExpectIntact();
}

TEST_F(WatermarksTest, WhenHostIsFullTooTheColdestOfItGoes) {
  Start(128, 32);  // host: 24, then 16
  for (int32_t i = 0; i < 3; ++i) {
    Cache(40, i * 100'000);
    MoveAll();
  }
  EXPECT_LE(Pool(Tier::kDevice).used_bytes, 96 * kPage);
  EXPECT_LE(Pool(Tier::kHost).used_bytes, 24 * kPage);
  EXPECT_GT(store_->inspection().Counters().evicted_pages, 0u);
  EXPECT_EQ(Held(40, 200'000, Tier::kDevice), 40u);
  EXPECT_LT(Held(40, 0, Tier::kDevice) + Held(40, 0, Tier::kHost), 40u) << "the oldest";
}

TEST_F(WatermarksTest, APageThatIsUsedDuringItsCopyStays) {
  Start(128, 128);
  Cache(100, 0);
  // Steps are made one by one: what opens in between keeps what it found.
  ASSERT_TRUE(store_->moves().MoveSome(4 * kPage).has_value());
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(50 * 16 + 1));
  EXPECT_EQ(s.opened().held_tokens, 800u);
  MoveAll();
  s.ExpectIntact();
}

TEST_F(WatermarksTest, OpeningOnPagesOfHostBringsThemBack) {
  Start(128, 128);
  TestSequence first = TestSequence::Prompt(session_.get(), "full", Tokens(20 * 16 + 1));
  ASSERT_TRUE(store_->moves().Move(first.id(), Tier::kHost).ok());
  ASSERT_TRUE(first.Close().ok());
  ASSERT_EQ(Held(20, 0, Tier::kHost), 20u);
  const uint64_t wakes = wakes_;
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(20 * 16 + 1));
  EXPECT_EQ(s.opened().held_tokens, 320u);
  EXPECT_GT(wakes_, wakes);
  const uint64_t version = store_->inspection().Show(s.id())->info.version;
  EXPECT_EQ(MoveAll(), 20 * kPage);
  const SequenceInfo info = store_->inspection().Show(s.id())->info;
  EXPECT_EQ(info.host_bytes, 0u);
  EXPECT_EQ(info.version, version + 5) << "a table a piece";
  EXPECT_EQ(store_->inspection().Counters().promoted_pages, 20u);
  s.ExpectIntact();
  EXPECT_TRUE(s.Append(7).ok());
}

TEST_F(WatermarksTest, ItBringsBackOnlyWhatFitsBelowTheMark) {
  Start(128, 128);
  TestSequence first = TestSequence::Prompt(session_.get(), "full", Tokens(40 * 16 + 1));
  ASSERT_TRUE(store_->moves().Move(first.id(), Tier::kHost).ok());
  ASSERT_TRUE(first.Close().ok());
  TestSequence other = TestSequence::Prompt(session_.get(), "full", Tokens(70 * 16, 100'000));
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(40 * 16 + 1));
  MoveAll();
  EXPECT_LE(Pool(Tier::kDevice).used_bytes, 96 * kPage);
  EXPECT_GT(store_->inspection().Counters().promoted_pages, 10u);
  EXPECT_GT(store_->inspection().Show(s.id())->info.host_bytes, 0u);
  EXPECT_EQ(store_->inspection().Counters().evicted_pages, 0u);
  s.ExpectIntact();
}

TEST_F(WatermarksTest, APlanThatLivesOnHostIsLeftThere) {
  Start(128, 128);
  Cache(20, 0, "full{tier = \"host\"}");
  ASSERT_EQ(Held(20, 0, Tier::kHost), 20u);
  TestSequence s = TestSequence::Prompt(session_.get(), "full{tier = \"host\"}", Tokens(321));
  EXPECT_EQ(MoveAll(), 0u);
}

TEST_F(WatermarksTest, ASequenceThatClosedIsForgotten) {
  Start(128, 128);
  TestSequence first = TestSequence::Prompt(session_.get(), "full", Tokens(20 * 16 + 1));
  ASSERT_TRUE(store_->moves().Move(first.id(), Tier::kHost).ok());
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(20 * 16 + 1));
  ASSERT_TRUE(s.Close().ok());
  ASSERT_TRUE(first.Close().ok());
  EXPECT_EQ(MoveAll(), 0u);
}

// --- capacities ----------------------------------------------------------------------------------

TEST_F(WatermarksTest, APoolGrows) {
  Start(256, 32);
  EXPECT_EQ(session_->Open("full", Tokens(400 * 16)).status().reason(), "POOL_EXHAUSTED");
  const Result<ResizedPool> grown = store_->moves().ResizePool(Tier::kDevice, 512 * kPage);
  ASSERT_TRUE(grown.ok());
  EXPECT_EQ(grown->capacity_bytes, 512 * kPage);
  EXPECT_TRUE(session_->Open("full", Tokens(400 * 16)).ok());
  EXPECT_EQ(Pool(Tier::kDevice).capacity_bytes, 512 * kPage);
  ExpectClean(*store_);
}

TEST_F(WatermarksTest, APoolShrinksByWhatNobodyUses) {
  Start(1024, 32);
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100 * 16));
  Cache(600, 100'000);
  const Result<ResizedPool> shrunk = store_->moves().ResizePool(Tier::kDevice, 256 * kPage);
  ASSERT_TRUE(shrunk.ok());
  EXPECT_EQ(shrunk->capacity_bytes, 256 * kPage);
  EXPECT_LE(shrunk->taken_bytes, 256 * kPage);
  EXPECT_GT(shrunk->evicted_pages, 300u);
  s.ExpectIntact();
  EXPECT_EQ(session_->Open("full", Tokens(400 * 16, 900'000)).status().reason(), "POOL_EXHAUSTED");
  ExpectClean(*store_);
}

TEST_F(WatermarksTest, WhatIsInUseBeyondTheCapacityGoesBackLater) {
  Start(1024, 32);
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(600 * 16));
  const Result<ResizedPool> shrunk = store_->moves().ResizePool(Tier::kDevice, 256 * kPage);
  ASSERT_TRUE(shrunk.ok());
  EXPECT_GE(shrunk->taken_bytes, 600 * kPage);
  EXPECT_EQ(shrunk->evicted_pages, 0u);
  s.ExpectIntact();
  const uint64_t wakes = wakes_;
  ASSERT_TRUE(s.Close().ok());
  EXPECT_GT(wakes_, wakes);
  MoveAll();
  EXPECT_LE(store_->moves().ResizePool(Tier::kDevice, 256 * kPage)->taken_bytes, 256 * kPage);
  ExpectClean(*store_);
}

TEST_F(WatermarksTest, PinsHoldTheirArenas) {
  Start(1024, 32);
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(500 * 16));
  ASSERT_TRUE(store_->pins().PinSequence(s.id(), std::chrono::hours(1)).ok());
  ASSERT_TRUE(s.Close().ok());
  const Result<ResizedPool> shrunk = store_->moves().ResizePool(Tier::kDevice, 256 * kPage);
  ASSERT_TRUE(shrunk.ok());
  EXPECT_GE(shrunk->taken_bytes, 500 * kPage);
  EXPECT_EQ(Held(499, 0, Tier::kDevice), 499u);
  EXPECT_EQ(store_->moves().ResizePool(Tier::kHost, kMiB - 1).status().reason(), "POOL_SIZE");
}

// --- what selectors chose ------------------------------------------------------------------------

constexpr const char* kQuest = "quest{min_tokens = 0}";

// Counts as a client's steps do.
void Select(const TestSession& session, const TestSequence& s, uint32_t page, uint32_t times) {
  shm::SessionHeader* header = session.segments().header;
  auto* access_counters = reinterpret_cast<uint32_t*>(reinterpret_cast<std::byte*>(header) +
                                                      header->access_counters_offset);
  access_counters[s.Table().table->first_access_counter + page] += times;
}

TEST_F(WatermarksTest, WhatSelectorsChoseOutlivesWhatIsYounger) {
  Start(64, 0);
  {
    TestSequence s = TestSequence::Prompt(session_.get(), kQuest, Tokens(20 * 16 + 1));
    Select(*session_, s, 0, 4);
    Select(*session_, s, 9, 4);  // pages 0 to 9 are worth something
    ASSERT_TRUE(s.Close().ok());
  }
  Cache(20, 100'000);
  TestSequence other = TestSequence::Prompt(session_.get(), "full", Tokens(28 * 16, 200'000));
  EXPECT_GT(store_->inspection().Counters().evicted_pages, 0u);
  EXPECT_GE(Held(20, 0, Tier::kDevice), 10u);
  EXPECT_LT(Held(20, 0, Tier::kDevice), 20u) << "its tail, which nobody selected, went first";
  EXPECT_EQ(Held(20, 100'000, Tier::kDevice), 20u);
  TestSequence more = TestSequence::Prompt(session_.get(), "full", Tokens(12 * 16, 300'000));
  EXPECT_EQ(Held(20, 0, Tier::kDevice), 10u);
  EXPECT_LT(Held(20, 100'000, Tier::kDevice), 20u) << "younger, and selected by nobody";
  ExpectClean(*store_);
}

TEST_F(WatermarksTest, OfAPrefixTheEndGoesFirst) {
  Start(64, 0);
  Cache(40, 0);
  for (int32_t i = 1; i <= 3; ++i) {
    TestSequence::Prompt(session_.get(), "full", Tokens(12 * 16, 100'000 * i));
    uint64_t cursor = 0;
    const size_t here = store_->values().PageValues(&cursor, 10'000).size();
    EXPECT_EQ(here, Held(40, 0, Tier::kDevice) + 12 * i) << "no page lies behind a gap";
  }
  EXPECT_LT(Held(40, 0, Tier::kDevice), 30u);
}

}  // namespace
}  // namespace kvstrata::testing
