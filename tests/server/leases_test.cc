// SPDX-License-Identifier: Apache-2.0
// Leases of look-ups: what is answered stays held, through whatever wants its memory.
#include <cstring>
#include <future>
#include <thread>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLease = std::chrono::seconds(30);
const std::vector<int32_t> kPrompt = Tokens(161);  // ten pages may be held of it

class LeasesTest : public ::testing::TestWithParam<const char*> {
 protected:
  ~LeasesTest() override { ExpectClean(*store_); }

  Result<PrefixHit> Lookup(milliseconds lease, const LookupPlan& open = {GetParam(), ""}) {
    std::promise<Result<PrefixHit>> answer;
    store_->leases().LookupLeased(scheduler_.id(), scheduler_.model(), kPrompt, open, lease,
                                  [&](const Result<PrefixHit>& hit) { answer.set_value(hit); });
    return answer.get_future().get();
  }
  void Compute(std::span<const int32_t> prompt) {
    TestSequence s = TestSequence::Prompt(&worker_, GetParam(), prompt);
    ASSERT_TRUE(s.Close().ok());
  }
  // Other prompts, until all that may go has gone.
  void Storm() {
    for (int32_t i = 1; i <= 20; ++i) Compute(Tokens(320, i * 1000));
    store_->eviction().Evict(false);
  }
  uint64_t Used() {
    return store_->user_limits()->Used(store_->user_limits()->For("uid:1"), Limit::kSequences);
  }
  uint32_t HeldAtOpen() {
    const Result<OpenedSequence> opened = worker_.Open(GetParam(), kPrompt);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    EXPECT_TRUE(store_->sequences().CloseSequence(worker_.id(), opened->sequence).ok());
    return opened->held_tokens;
  }
  static std::chrono::steady_clock::time_point After(milliseconds time) {
    return std::chrono::steady_clock::now() + time;
  }

  std::unique_ptr<Store> store_ = NewStore(SmallPools(64, 0));
  TestSession scheduler_{store_.get()}, worker_{store_.get()};
};
INSTANTIATE_TEST_SUITE_P(Plans, LeasesTest,
                         ::testing::Values("full", "quest{page = 16}", "sentencekv{n_obs = 20}"),
                         [](const auto& plan) {
                           return std::string(plan.param, strcspn(plan.param, "{"));
                         });

TEST_P(LeasesTest, WhatIsAnsweredStaysHeld) {
  Compute(kPrompt);
  const Result<PrefixHit> hit = Lookup(kLease);
  ASSERT_TRUE(hit.ok()) << hit.status().ToString();
  ASSERT_GT(hit->held_tokens(), 0u);
  Storm();
  EXPECT_EQ(HeldAtOpen(), hit->held_tokens());
}

TEST_P(LeasesTest, WithoutOneItGoes) {
  Compute(kPrompt);
  ASSERT_GT(Lookup(milliseconds(0))->held_tokens(), 0u);
  Storm();
  EXPECT_EQ(HeldAtOpen(), 0u);
}

TEST_P(LeasesTest, TakesNoMemory) {
  Compute(kPrompt);
  store_->references().Reclaim();
  const uint64_t used = UsedBytes(*store_);
  ASSERT_TRUE(Lookup(kLease).ok());
  EXPECT_EQ(UsedBytes(*store_), used);
  EXPECT_EQ(store_->inspection().Counters().lookup_tokens, kPrompt.size()) << "only opens count";
}

TEST_P(LeasesTest, EndsByItsTime) {
  Compute(kPrompt);
  ASSERT_TRUE(Lookup(kLease).ok());
  store_->leases().ExpireLeases(After(kLease / 2));
  Storm();
  EXPECT_GT(HeldAtOpen(), 0u);
  store_->leases().ExpireLeases(After(kLease));
  EXPECT_TRUE(store_->inspection().Sequences(0).empty());
  Storm();
  EXPECT_EQ(HeldAtOpen(), 0u);
}

TEST_P(LeasesTest, EndsWithItsSession) {
  Compute(kPrompt);
  ASSERT_TRUE(Lookup(kLease).ok());
  store_->sessions().EndSession(scheduler_.id(), SessionEnd::kDied);
  Storm();
  EXPECT_EQ(HeldAtOpen(), 0u);
  store_->leases().ExpireLeases(After(kLease));
}

TEST_P(LeasesTest, AskedAgainItIsRenewed) {
  Compute(kPrompt);
  ASSERT_TRUE(Lookup(kLease).ok());
  for (const milliseconds lease : {2 * kLease, kLease}) {
    ASSERT_TRUE(Lookup(lease).ok());
    EXPECT_EQ(store_->inspection().Sequences(0).size(), 1u);
  }
  store_->leases().ExpireLeases(After(kLease));
  EXPECT_EQ(store_->inspection().Sequences(0).size(), 1u)
      << "a shorter one takes nothing from a longer one";
  store_->leases().ExpireLeases(After(2 * kLease));
  EXPECT_TRUE(store_->inspection().Sequences(0).empty());
}

TEST_P(LeasesTest, AskedAgainItHoldsWhatCameMeanwhile) {
  Compute(Tokens(81));
  const uint32_t before = Lookup(kLease)->held_tokens();
  Compute(kPrompt);
  const uint32_t after = Lookup(kLease)->held_tokens();
  EXPECT_GT(after, before);
  EXPECT_EQ(store_->inspection().Sequences(0).size(), 1u);
  Storm();
  EXPECT_EQ(HeldAtOpen(), after);
}

TEST_P(LeasesTest, WhatIsNotHeldTakesNoLease) {
  EXPECT_EQ(Lookup(kLease)->held_tokens(), 0u);
  EXPECT_TRUE(store_->inspection().Sequences(0).empty());
}

TEST_P(LeasesTest, CountsAmongTheUsersSequences) {
  Compute(kPrompt);
  store_->user_limits()->Set("uid:1", Limit::kSequences, 1);
  TestSequence other = TestSequence::Prompt(&worker_, "full", Tokens(20, 7000));
  const Status refused = Lookup(kLease).status();
  EXPECT_EQ(refused.reason(), "SEQUENCE_LIMIT");
  EXPECT_NE(refused.message().find("kvstrata quota set"), std::string::npos) << refused.ToString();
  ASSERT_TRUE(other.Close().ok());
  ASSERT_TRUE(Lookup(kLease).ok());
  EXPECT_TRUE(Lookup(kLease).ok()) << "a renewal takes no second place";
}

TEST_P(LeasesTest, OnceOpenedItCountsNoMore) {
  Compute(kPrompt);
  store_->user_limits()->Set("uid:1", Limit::kSequences, 1);
  const Result<PrefixHit> hit = Lookup(kLease);
  ASSERT_TRUE(hit.ok()) << hit.status().ToString();
  EXPECT_EQ(Used(), 1u);
  const Result<OpenedSequence> opened = worker_.Open(GetParam(), kPrompt);
  ASSERT_TRUE(opened.ok()) << "the open that it promised: " << opened.status().ToString();
  EXPECT_EQ(opened->held_tokens, hit->held_tokens());
  EXPECT_EQ(Used(), 1u);
  EXPECT_EQ(worker_.Open(GetParam(), kPrompt).status().reason(), "SEQUENCE_LIMIT")
      << "one promise is one place";
  ASSERT_TRUE(store_->sequences().CloseSequence(worker_.id(), opened->sequence).ok());
  EXPECT_EQ(Used(), 1u) << "its time is not over";
  EXPECT_EQ(HeldAtOpen(), hit->held_tokens()) << "and again";
  store_->leases().ExpireLeases(After(kLease));
  EXPECT_EQ(Used(), 0u);
}

TEST_P(LeasesTest, ItsEndLeavesThePlaceToWhoOpenedIt) {
  Compute(kPrompt);
  ASSERT_TRUE(Lookup(kLease).ok());
  const Result<OpenedSequence> opened = worker_.Open(GetParam(), kPrompt);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  store_->leases().ExpireLeases(After(kLease));
  EXPECT_EQ(Used(), 1u);
  ASSERT_TRUE(store_->sequences().CloseSequence(worker_.id(), opened->sequence).ok());
  EXPECT_EQ(Used(), 0u);
}

// Two requests with one prompt: the first is over before the second is opened.
TEST_P(LeasesTest, HoldsForAllThatItWasRenewedFor) {
  Compute(kPrompt);
  const uint32_t held = Lookup(kLease)->held_tokens();
  ASSERT_EQ(Lookup(kLease)->held_tokens(), held);
  const Result<OpenedSequence> first = worker_.Open(GetParam(), kPrompt);
  const Result<OpenedSequence> second = worker_.Open(GetParam(), kPrompt);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(Used(), 2u);
  for (const uint64_t id : {first->sequence, second->sequence}) {
    ASSERT_TRUE(store_->sequences().CloseSequence(worker_.id(), id).ok());
  }
  EXPECT_EQ(Used(), 1u);
  Storm();
  EXPECT_EQ(HeldAtOpen(), held);
}

TEST_P(LeasesTest, OnlyWhatItPromisedTakesItsPlace) {
  Compute(kPrompt);
  ASSERT_TRUE(Lookup(kLease).ok());
  OpenOptions apart;
  apart.private_pages = true;
  const auto open = [&](std::span<const int32_t> prompt, const OpenOptions& options) {
    return store_->openings()
        .OpenSequence(worker_.id(), worker_.model(), GetParam(), prompt, options)
        .ok();
  };
  EXPECT_TRUE(open(Tokens(161, 5), {}));
  EXPECT_TRUE(open(Tokens(160), {})) << "a part of it";
  EXPECT_TRUE(open(kPrompt, apart));
  const Result<OpenedSequence> sibling = worker_.Open("window", kPrompt);
  EXPECT_EQ(Used(), 5u) << "the lease, and four";
  const Result<OpenedSequence> opened = worker_.Open(GetParam(), kPrompt);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(Used(), 5u);
  const Result<OpenedSequence> fork =
      store_->sequences().ForkSequence(worker_.id(), opened->sequence);
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(Used(), 6u);
  ASSERT_TRUE(store_->sequences().CloseSequence(worker_.id(), fork->sequence).ok());
  EXPECT_EQ(Used(), 5u) << "a fork has a place of its own";
  ASSERT_TRUE(store_->sequences().CloseSequence(worker_.id(), opened->sequence).ok());
  EXPECT_EQ(Used(), 5u);
}

TEST_P(LeasesTest, AnotherUserDoesNotTakeItsPlace) {
  Compute(kPrompt);
  ASSERT_TRUE(Lookup(kLease).ok());
  TestSession stranger(store_.get(), "uid:2");
  ASSERT_TRUE(stranger.Open(GetParam(), kPrompt).ok());
  EXPECT_EQ(Used(), 1u);
  const Result<OpenedSequence> opened = worker_.Open(GetParam(), kPrompt);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(Used(), 1u);
}

// Renewals, ends and opens of one prompt from several threads: the books are right afterwards.
TEST_P(LeasesTest, ManyAskAtOnce) {
  Compute(kPrompt);
  ASSERT_TRUE(Lookup(kLease).ok());
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([this] {
      for (int n = 0; n < 200; ++n) EXPECT_TRUE(Lookup(kLease).ok());
    });
  }
  threads.emplace_back([this] {
    for (int n = 0; n < 200; ++n) store_->leases().ExpireLeases(After(kLease));
  });
  threads.emplace_back([this] {
    for (int n = 0; n < 200; ++n) HeldAtOpen();
  });
  for (std::thread& thread : threads) thread.join();
  ExpectClean(*store_);
  store_->leases().ExpireLeases(After(kLease));
  EXPECT_TRUE(store_->inspection().Sequences(0).empty());
}

TEST_P(LeasesTest, RefusalsNameWhatIsAllowed) {
  for (const milliseconds lease : {milliseconds(-1), milliseconds(60001)}) {
    const Status refused = Lookup(lease).status();
    EXPECT_EQ(refused.reason(), "LEASE_TIME");
    EXPECT_NE(refused.message().find("60000"), std::string::npos) << refused.ToString();
  }
  EXPECT_EQ(Lookup(kLease, {}).status().reason(), "LEASE_PLAN");
  EXPECT_EQ(Lookup(kLease, {GetParam(), "GPU-9"}).status().reason(), "DEVICE_UNKNOWN");
}

}  // namespace
}  // namespace kvstrata::testing
