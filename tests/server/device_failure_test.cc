// SPDX-License-Identifier: Apache-2.0
// A device pool that is lost to the daemon, as after a GPU's sticky error: it is told once, seen in
// the pools, gives nothing any more, and the host goes on.
#include <gtest/gtest.h>

#include "tests/fakes/copying_codec.h"
#include "tests/fakes/failing_resource.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

constexpr char kOnHost[] = "full{tier = \"host\"}";

class DeviceFailure : public ::testing::Test {
 protected:
  void SetUp() override {
    StoreOptions options = SmallPools(256, 256);
    options.on_pool_failure = [this](PoolId pool, const Status& why) {
      EXPECT_EQ(pool, PoolId::Device(0));
      EXPECT_EQ(why.reason(), "DEVICE_FAILED");
      ++told_;
    };
    options.new_recompressor = [](const Plan& plan, const Geometry& geometry,
                                  ParametersPtr) -> std::unique_ptr<Recompressor> {
      if (plan.selector != SelectorKind::kWindow) return nullptr;
      return std::make_unique<CopyingCodec>(std::make_shared<CodecControl>(), geometry);
    };
    Result<std::unique_ptr<Store>> store =
        Store::Create(options, NewLosableResource(NewEmulatedDevice(), lost_), NewHostMemory());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    session_ = std::make_unique<TestSession>(store_.get());
  }
  uint32_t Held(const std::vector<int32_t>& prompt) {
    return store_->lookups().Lookup(session_->id(), session_->model(), prompt)->held_tokens();
  }
  Tier TierOf(const TestSequence& s) {
    return store_->inspection().Show(s.id())->pages.front().tier;
  }
  // The first copy after the device was lost.
  void Lose(const TestSequence& s) {
    *lost_ = true;
    EXPECT_EQ(store_->moves().Move(s.id(), Tier::kHost).status().reason(), "DEVICE_FAILED");
    store_->references().Reclaim();
  }

  std::shared_ptr<std::atomic<bool>> lost_ = std::make_shared<std::atomic<bool>>(false);
  int told_ = 0;
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

TEST_F(DeviceFailure, IsToldOnceAndSeenInThePools) {
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  EXPECT_EQ(store_->inspection().Pools()[0].failure, "");
  Lose(s);
  EXPECT_EQ(store_->moves().Move(s.id(), Tier::kHost).status().reason(), "DEVICE_FAILED");
  EXPECT_EQ(told_, 1);
  EXPECT_NE(store_->inspection().Pools()[0].failure, "");
  EXPECT_EQ(store_->inspection().Pools()[1].failure, "");
}

TEST_F(DeviceFailure, ItsSequencesAreRefusedWithTheNextStep) {
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  Lose(s);
  const Status grown = s.Append(Tokens(40, 500));
  EXPECT_EQ(grown.reason(), "DEVICE_FAILED");
  EXPECT_NE(grown.message().find("open it again"), std::string::npos) << grown.message();
  EXPECT_EQ(s.Fork().status().reason(), "DEVICE_FAILED");
  EXPECT_TRUE(s.Close().ok());
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectClean(*store_);
}

// Commits give them no pages of the host, ahead of need: decoding ends where the table does.
TEST_F(DeviceFailure, ItsSequencesGetNoMorePages) {
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  Lose(s);
  const size_t pages = store_->inspection().Show(s.id())->pages.size();
  Status status;
  for (int i = 0; i < 400 && status.ok(); ++i) status = s.Append(Tokens(1, 500 + i));
  EXPECT_EQ(status.reason(), "DEVICE_FAILED") << status.ToString();
  EXPECT_EQ(store_->inspection().Show(s.id())->pages.size(), pages);
  ExpectClean(*store_);
}

TEST_F(DeviceFailure, TheHostGoesOn) {
  TestSequence on_host = TestSequence::Prompt(session_.get(), kOnHost, Tokens(100, 300));
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  ASSERT_EQ(TierOf(s), Tier::kDevice);
  Lose(s);
  ASSERT_TRUE(on_host.Append(Tokens(50, 700)).ok());
  on_host.ExpectIntact();
  EXPECT_EQ(Held(Tokens(100, 300)), 96u);
  EXPECT_EQ(store_->moves().Move(on_host.id(), Tier::kDevice).status().reason(), "DEVICE_FAILED");
  // What lay on the device is a miss, whoever held it; the same prompt is served from the host.
  EXPECT_EQ(Held(Tokens(100)), 0u);
  TestSequence again = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  EXPECT_EQ(again.opened().held_tokens, 0u);
  EXPECT_EQ(TierOf(again), Tier::kHost);
  ASSERT_TRUE(again.Append(Tokens(50, 900)).ok());
  again.ExpectIntact();
  EXPECT_EQ(Held(Tokens(100)), 96u);
  ExpectClean(*store_);
}

// Whoever asks first after the device was lost, and however.
TEST_F(DeviceFailure, WhatLayThereIsHeldForNobody) {
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  const std::vector<PageKey> keys =
      store_->lookups().Lookup(session_->id(), session_->model(), Tokens(100))->keys;
  store_->devices().LoseDevice(0, Internal("DEVICE_FAILED", "as after a sticky error"));
  EXPECT_TRUE(store_->lookups().Lookup(session_->id(), session_->model(), keys)->pages.empty());
}

TEST_F(DeviceFailure, APinOfTokensFindsNothingThere) {
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  store_->devices().LoseDevice(0, Internal("DEVICE_FAILED", "as after a sticky error"));
  EXPECT_EQ(store_->pins()
                .PinPrefix("uid:1", session_->model(), Tokens(100), std::chrono::hours(1))
                .status()
                .reason(),
            "PIN_MISS");
}

TEST_F(DeviceFailure, CachedPagesAndArtefactsThereAreForgotten) {
  TestSequence s = TestSequence::Prompt(session_.get(), "window", Tokens(100));
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
  (void)Recompress(store_.get(), s.id());
  ASSERT_EQ(store_->inspection().Counters().artefacts, 1u);
  TestSequence cached = TestSequence::Prompt(session_.get(), "full", Tokens(100, 300));
  ASSERT_TRUE(cached.Close().ok());
  TestSequence used = TestSequence::Prompt(session_.get(), "full", Tokens(100, 600));
  ASSERT_EQ(Held(Tokens(100, 300)), 96u);
  ASSERT_EQ(Held(Tokens(100, 600)), 96u);
  Lose(used);
  EXPECT_EQ(store_->inspection().Counters().artefacts, 0u);
  EXPECT_EQ(Held(Tokens(100, 300)), 0u);
  EXPECT_EQ(Held(Tokens(100, 600)), 0u);
  EXPECT_EQ(Held(Tokens(100)), 96u) << "its raw pages lie on the host";
  ASSERT_TRUE(s.Close().ok());
  ASSERT_TRUE(used.Close().ok());
  (void)store_->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectClean(*store_);
}

TEST_F(DeviceFailure, AnAllocationMayFindItOut) {
  *lost_ = true;
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(100));
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(TierOf(s), Tier::kHost);
  s.ExpectIntact();
  const Status status = session_->Open("full", Tokens(256 * 16, 5000)).status();
  EXPECT_EQ(status.reason(), "POOL_EXHAUSTED");
  EXPECT_NE(status.message().find("is lost"), std::string::npos) << status.message();
  ExpectClean(*store_);
}

}  // namespace
}  // namespace kvstrata::testing
