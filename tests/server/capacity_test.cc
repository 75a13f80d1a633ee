// SPDX-License-Identifier: Apache-2.0
// What there is room for: counted without taking anything, and true of the open that follows;
// refusals that say what would fit; pages that an open takes ahead.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPage = 4096;
constexpr uint32_t kHeadroom = 16;  // SmallPools

class CapacityTest : public ::testing::TestWithParam<const char*> {
 protected:
  void Serve(const StoreOptions& options) {
    store_ = NewStore(options);
    session_ = std::make_unique<TestSession>(store_.get());
  }
  Capacity Now(const TestSession& session) const {
    Result<Capacity> capacity =
        store_->capacity().CountCapacity(session.id(), session.model(), GetParam());
    EXPECT_TRUE(capacity.ok()) << capacity.status().ToString();
    return *capacity;
  }
  Capacity Now() const { return Now(*session_); }
  // An open of all that there is said to be room for succeeds, one of a page more does not.
  void ExpectTrue(TestSession* session, int32_t first) {
    const auto open = Now(*session).open_tokens;
    const auto refused = session->Open(GetParam(), Tokens(static_cast<int32_t>(open + 16), first));
    EXPECT_EQ(refused.status().reason(), "POOL_EXHAUSTED") << open;
    EXPECT_THAT(std::string(refused.status().message()),
                HasSubstr("; " + std::to_string(open) + " tokens of this model fit now"));
    if (open == 0) return;
    const auto opened = session->Open(GetParam(), Tokens(static_cast<int32_t>(open), first));
    ASSERT_TRUE(opened.ok()) << open << ": " << opened.status().ToString();
    EXPECT_EQ(Now(*session).open_tokens, 0u);
    EXPECT_TRUE(store_->sequences().CloseSequence(session->id(), opened->sequence).ok());
  }
  // Cached pages: their sequence is closed.
  void Cache(TestSession* session, std::span<const int32_t> prompt) const {
    TestSequence s = TestSequence::Prompt(session, GetParam(), prompt);
    ASSERT_TRUE(s.Close().ok());
  }
  OpenOptions Reserve(uint32_t tokens) const { return {{}, tokens}; }
  Result<OpenedSequence> Open(const std::vector<int32_t>& prompt, uint32_t reserve) {
    return store_->openings().OpenSequence(session_->id(), session_->model(), GetParam(), prompt,
                                           Reserve(reserve));
  }

  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

INSTANTIATE_TEST_SUITE_P(Plans, CapacityTest, ::testing::Values("full", "quest"));

TEST_P(CapacityTest, CountsBothPoolsAndTakesNothing) {
  Serve(SmallPools(64, 32));
  const Capacity empty = Now();
  EXPECT_EQ(empty.device.free.bytes, 64 * kPage);
  EXPECT_EQ(empty.host.free.bytes, 32 * kPage);
  EXPECT_EQ(empty.device.limit.bytes, kUnlimited);
  EXPECT_EQ(empty.device.limit.tokens, kUnlimited);
  const bool indexed = std::string(GetParam()) == "quest";
  EXPECT_EQ(empty.device.free.tokens == 64 * 16, !indexed) << "an index has a share";
  EXPECT_EQ(empty.open_tokens + kHeadroom == 96 * 16, !indexed);
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectTrue(session_.get(), 0);
  ExpectClean(*store_);
}

TEST_P(CapacityTest, WhatNobodyUsesIsRoomAfterEviction) {
  Serve(SmallPools(64, 0));
  const Capacity before = Now();
  Cache(session_.get(), Tokens(320));
  const Capacity after = Now();
  EXPECT_EQ(after.device.after_eviction.bytes, before.device.free.bytes);
  EXPECT_EQ(after.open_tokens, before.open_tokens);
  EXPECT_LE(after.device.free.bytes, before.device.free.bytes - 20 * kPage);
  EXPECT_EQ(store_->inspection().Pools()[0].cached_bytes,
            before.device.free.bytes - after.device.free.bytes);
  const TestSequence used = TestSequence::Prompt(session_.get(), GetParam(), Tokens(320));
  EXPECT_LE(Now().device.after_eviction.bytes, before.device.free.bytes - 20 * kPage) << "in use";
  ExpectTrue(session_.get(), 100'000);
  used.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(CapacityTest, ArenasOfOthersAreRoomWhenNobodyUsesAnyOfThem) {
  Serve(SmallPools(64, 0));  // two arenas
  TestSession other(store_.get(), "uid:2");
  Cache(&other, Tokens(160));
  EXPECT_EQ(Now().device.free.bytes, 32 * kPage);
  EXPECT_EQ(Now().device.after_eviction.bytes, 64 * kPage);
  const TestSequence used = TestSequence::Prompt(&other, GetParam(), Tokens(16, 5000));
  EXPECT_EQ(Now().device.after_eviction.bytes, 32 * kPage);
  ExpectTrue(session_.get(), 0);
  used.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(CapacityTest, AUsersLimitBounds) {
  UserLimitsOptions limits;
  limits.defaults[Limit::kDeviceBytes] = 40 * kPage;
  limits.defaults[Limit::kHostBytes] = 1;  // no arena can be made of it
  StoreOptions options = SmallPools(256, 256);
  options.user_limits = std::make_shared<UserLimits>(limits);
  Serve(options);
  const Capacity room = Now();
  EXPECT_EQ(room.device.limit.bytes, 40 * kPage);
  EXPECT_EQ(room.device.free.bytes, 40 * kPage);
  EXPECT_EQ(room.device.limit.tokens, room.device.free.tokens);
  EXPECT_EQ(room.host.free.bytes, 0u);
  EXPECT_EQ(room.host.limit.bytes, 1u);
  ExpectTrue(session_.get(), 0);
  Cache(session_.get(), Tokens(160, 9000));
  EXPECT_EQ(Now().device.after_eviction.bytes, 40 * kPage);
  EXPECT_EQ(Now().device.limit.bytes, 0u) << "its arenas are its own, whatever is in them";
  ExpectTrue(session_.get(), 50'000);
  ExpectClean(*store_);
}

TEST_P(CapacityTest, IsTrueInAnyState) {
  const auto seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
  for (int round = 0; round < 20; ++round) {
    Serve(SmallPools(64 + 32 * static_cast<uint64_t>(below(4)), 32));
    TestSession other(store_.get(), below(2) == 0 ? "uid:1" : "uid:2");
    std::vector<TestSequence> open;
    for (int i = 0; i < 8; ++i) {
      TestSession* const session = below(3) == 0 ? &other : session_.get();
      const auto prompt = Tokens(1 + below(300), 1000 * (i + 1));
      if (prompt.size() > Now(*session).open_tokens) continue;
      TestSequence s = TestSequence::Prompt(session, GetParam(), prompt);
      if (below(2) == 0) {
        ASSERT_TRUE(s.Close().ok());
      } else {
        open.push_back(s);
      }
    }
    // An index block that is larger than a page needs pages side by side; of what is cached it is
    // not known whether they are.
    if (std::string(GetParam()) != "full") store_->eviction().Evict(false);
    ExpectTrue(session_.get(), 100'000);
    for (const TestSequence& s : open) s.ExpectIntact();
    ExpectClean(*store_);
  }
}

// quest's index block is two pages large: of these holes one is, and pages must leave it alone.
TEST_P(CapacityTest, BetweenOthersPagesThereIsRoomForWhatFits) {
  Serve(SmallPools(32, 0));
  std::vector<uint64_t> pages;
  for (Result<OpenedSequence> s = session_->Open("full", {}); s.ok();
       s = session_->Open("full", {})) {
    pages.push_back(s->sequence);
  }
  ASSERT_EQ(pages.size(), 32u);
  std::vector<std::pair<uint64_t, uint64_t>> by_place;
  for (const uint64_t s : pages)
    by_place.emplace_back(store_->inspection().Show(s)->pages[0].offset, s);
  std::ranges::sort(by_place);
  const auto close = [&](size_t at) {
    ASSERT_TRUE(store_->sequences().CloseSequence(session_->id(), by_place[at].second).ok());
  };
  const bool indexed = std::string(GetParam()) == "quest";
  for (const size_t at : {5, 7, 9, 11, 13, 15}) close(at);
  EXPECT_EQ(Now().device.free.tokens, indexed ? 0u : 6 * 16u);
  ExpectTrue(session_.get(), 1000);
  for (const size_t at : {2, 3}) close(at);
  EXPECT_EQ(Now().device.free.tokens, (indexed ? 6 : 8) * 16u);
  ExpectTrue(session_.get(), 1000);
  ExpectClean(*store_);
}

TEST_P(CapacityTest, RefusalsNameTheirCause) {
  Serve(SmallPools(64, 0));
  const auto model = session_->model();
  EXPECT_EQ(store_->capacity().CountCapacity(session_->id(), model, "qest").status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(store_->capacity().CountCapacity(session_->id(), model + 1, "full").status().reason(),
            "MODEL_UNKNOWN");
  EXPECT_EQ(store_->capacity().CountCapacity(session_->id() + 1, model, "full").status().reason(),
            "SESSION_UNKNOWN");
}

// --- growing ---

TEST_P(CapacityTest, ARefusedGrowSaysHowFarItCouldGo) {
  Serve(SmallPools(32, 0));
  TestSequence s = TestSequence::Prompt(session_.get(), GetParam(), Tokens(100));
  const auto grow = [&](uint32_t tokens) {
    return store_->steps().Grow(session_->id(), s.id(), tokens, 100, 96);
  };
  const std::string message(grow(2000).message());
  const std::string behind = " tokens of this model fit now";
  const size_t at = message.find(behind);
  ASSERT_NE(at, std::string::npos) << message;
  const size_t begin = message.rfind(' ', at - 1) + 1;
  const auto fits = static_cast<uint32_t>(std::stoul(message.substr(begin, at - begin)));
  EXPECT_GT(fits, 300u);
  EXPECT_EQ(grow(fits + 16).reason(), "POOL_EXHAUSTED");
  EXPECT_TRUE(grow(fits).ok()) << fits;
  s.ExpectIntact();
  ExpectClean(*store_);
}

// A reply has room for 455 bytes of text; large numbers are some 70 digits longer than these.
TEST_P(CapacityTest, TheTextOfARefusalFitsAReply) {
  UserLimitsOptions limits;
  limits.defaults[Limit::kDeviceBytes] = limits.defaults[Limit::kHostBytes] = 1;
  StoreOptions options = SmallPools(64, 64);
  options.user_limits = std::make_shared<UserLimits>(limits);
  Serve(options);
  TestSession user(store_.get(), "uid:4294967295");
  const Status refused = user.Open(GetParam(), Tokens(160)).status();
  EXPECT_EQ(refused.reason(), "POOL_EXHAUSTED");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("; 0 tokens of this model fit now"));
  EXPECT_LE(refused.message().size(), 455u - 70) << refused.message();
}

// --- reservations ---

TEST_P(CapacityTest, AReservationIsKeptWhenThePoolIsFull) {
  Serve(SmallPools(64, 32));
  const uint32_t reserved = 40 * 16;
  const auto prompt = Tokens(100);
  Result<OpenedSequence> opened = Open(prompt, reserved);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  TestSequence s(session_.get(), *opened, prompt);
  ASSERT_TRUE(s.Append(prompt).ok());
  while (session_->Open("full", {}).ok()) {  // others take what is left
  }
  for (int32_t t = 100; t < static_cast<int32_t>(reserved); ++t) ASSERT_TRUE(s.Append(t).ok()) << t;
  EXPECT_EQ(s.Append(7).reason(), "POOL_EXHAUSTED");
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(CapacityTest, AReservationIsAllOrNothing) {
  Serve(SmallPools(64, 0));
  const Capacity room = Now();
  const auto all = static_cast<uint32_t>(room.device.free.tokens);
  const Status refused = Open(Tokens(20), all + 16).status();
  EXPECT_EQ(refused.reason(), "POOL_EXHAUSTED");
  EXPECT_EQ(UsedBytes(*store_), 0u);
  EXPECT_EQ(Open({}, (1u << 24) + 1).status().reason(), "SEQUENCE_TOO_LONG");
  Result<OpenedSequence> opened = Open(Tokens(20), all);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  EXPECT_EQ(Now().open_tokens, 0u);
  ExpectClean(*store_);
  ASSERT_TRUE(store_->sequences().CloseSequence(session_->id(), opened->sequence).ok());
  EXPECT_EQ(UsedBytes(*store_), 0u) << "what was not used is released";
  EXPECT_EQ(Now().open_tokens, room.open_tokens);
}

TEST_P(CapacityTest, AReservationEndsWhenItsSequenceIsTruncated) {
  Serve(SmallPools(64, 0));
  const auto prompt = Tokens(100);
  TestSequence s(session_.get(), *Open(prompt, 500), prompt);
  ASSERT_TRUE(s.Append(prompt).ok());
  ASSERT_TRUE(s.Truncate(64).ok());
  EXPECT_LE(s.Table().pages, (64 + kHeadroom) / 16);
  ASSERT_TRUE(s.Append(9).ok());
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(CapacityTest, AReservationCountsAsItsUsersBytes) {
  UserLimitsOptions limits;
  limits.defaults[Limit::kDeviceBytes] = 32 * kPage;
  StoreOptions options = SmallPools(256, 0);
  options.user_limits = std::make_shared<UserLimits>(limits);
  Serve(options);
  const Status refused = Open(Tokens(20), 33 * 16).status();
  EXPECT_EQ(refused.reason(), "POOL_EXHAUSTED");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("uid:1 has"));
  ASSERT_TRUE(Open(Tokens(20), 20 * 16).ok());
  EXPECT_EQ(store_->user_limits()->ReportOf("uid:1").used[Limit::kDeviceBytes], 32 * kPage);
}

TEST_P(CapacityTest, AReservationOfAGpusPoolGoesOnInHostMemory) {
  auto gpu = std::make_unique<FakeGpuMemory>(std::make_shared<std::atomic<bool>>(), kPage);
  auto store = Store::Create(SmallPools(32, 64), std::move(gpu), NewHostMemory());
  ASSERT_TRUE(store.ok()) << store.status().ToString();
  store_ = *std::move(store);
  session_ = std::make_unique<TestSession>(store_.get());
  const auto prompt = Tokens(100);
  TestSequence s(session_.get(), *Open(prompt, 40 * 16), prompt);
  EXPECT_EQ(s.Table().page(0)->tier, 0);
  EXPECT_EQ(s.Table().page(39)->tier, 1);
  ASSERT_TRUE(s.Append(prompt).ok());
  while (session_->Open("full", {}).ok()) {
  }
  ASSERT_TRUE(s.Append(Tokens(40 * 16 - 100, 100)).ok());
  s.ExpectIntact();
  ExpectClean(*store_);
}

// Fewer than the prompt has is none.
TEST_P(CapacityTest, ASmallReservationChangesNothing) {
  Serve(SmallPools(64, 0));
  const auto prompt = Tokens(100);
  const TestSequence with(session_.get(), *Open(prompt, 50), {});
  const TestSequence without(session_.get(), *session_->Open(GetParam(), prompt), {});
  EXPECT_EQ(with.Table().pages, without.Table().pages);
  EXPECT_EQ(with.Table().index_blocks, without.Table().index_blocks);
}

}  // namespace
}  // namespace kvstrata::testing
