// SPDX-License-Identifier: Apache-2.0
// Pages of users that have limits: at its limit a user's own cached pages make room, and nobody
// else's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

constexpr uint64_t kGranularity = 4 * 4096;  // four pages, as a GPU's is many

class UserSharesTest : public ::testing::Test {
 protected:
  // `bytes`: of each pool that a user may have; a page has 4096.
  void Serve(uint64_t bytes) {
    UserLimitsOptions limits;
    limits.defaults[Limit::kDeviceBytes] = limits.defaults[Limit::kHostBytes] = bytes;
    StoreOptions options = SmallPools(64, 0);
    options.arena_bytes = kGranularity;
    options.user_limits = std::make_shared<UserLimits>(limits);
    auto device =
        std::make_unique<FakeGpuMemory>(std::make_shared<std::atomic<bool>>(), kGranularity);
    auto store = Store::Create(options, std::move(device), NewHostMemory());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = *std::move(store);
  }
  // Cached pages of a user: their sequence is closed.
  void Cache(TestSession* session, std::span<const int32_t> prompt) {
    const TestSequence s = TestSequence::Prompt(session, "full", prompt);
    ASSERT_TRUE(store_->sequences().CloseSequence(session->id(), s.id()).ok());
  }
  uint32_t HeldOf(const TestSession& session, std::span<const int32_t> prompt) const {
    return store_->lookups().Lookup(session.id(), session.model(), prompt)->held_tokens();
  }

  std::unique_ptr<Store> store_;
};

TEST_F(UserSharesTest, AtItsLimitAUsersOwnCachedPagesMakeRoom) {
  Serve(16 * 4096);
  TestSession neighbour(store_.get(), "uid:1"), user(store_.get(), "uid:2");
  const auto theirs = Tokens(100, 1'000'000), first = Tokens(100);
  Cache(&neighbour, theirs);
  Cache(&user, first);
  for (int i = 1; i < 6; ++i) Cache(&user, Tokens(100, i * 1000));
  EXPECT_EQ(HeldOf(neighbour, theirs), 96u);
  EXPECT_LT(HeldOf(user, first), 96u) << "it made room";
  EXPECT_EQ(store_->user_limits()->ReportOf("uid:2").refused, 0u);
  ExpectClean(*store_);
}

// A rest of its limit that no arena can be made of is none.
TEST_F(UserSharesTest, WhoIsRefusedDropsNothingOfOthersAndIsCountedOnce) {
  Serve(4 * kGranularity + 2 * 4096);
  TestSession neighbour(store_.get(), "uid:1"), user(store_.get(), "uid:2");
  const auto theirs = Tokens(100, 1'000'000);
  Cache(&neighbour, theirs);
  Status refused;
  for (int i = 1; i < 20 && refused.ok(); ++i) {
    refused = user.Open("full", Tokens(100, i * 1000)).status();
  }
  EXPECT_EQ(refused.reason(), "POOL_EXHAUSTED");
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("uid:2 has"));
  EXPECT_EQ(store_->user_limits()->ReportOf("uid:2").refused, 1u);
  EXPECT_EQ(HeldOf(neighbour, theirs), 96u);
  ExpectClean(*store_);
}

}  // namespace
}  // namespace kvstrata::testing
