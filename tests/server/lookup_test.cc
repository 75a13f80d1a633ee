// SPDX-License-Identifier: Apache-2.0
// Look-ups: where the longest held prefix lies, page by page, in memory and in the tier below.
#include <set>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using enum Tier;

// A tier that holds keys and can read nothing.
class KeysOnly final : public PageTier {
 public:
  void Offer(const TierOffer&) override {}
  bool Search(TierSearch) override { return false; }
  bool Holds(const PageKey& key) const override { return keys.contains(key); }
  Status Pin(const PrefixPin&) override { return OkStatus(); }
  Status Unpin(const PrefixPin&, bool) override { return OkStatus(); }
  bool Load(TierLoad) override {
    ADD_FAILURE() << "a look-up reads nothing";
    return false;
  }
  std::set<PageKey> keys;
};

class LookupTest : public ::testing::Test {
 protected:
  ~LookupTest() override {
    ExpectClean(*store_);
    store_->prefixes().SetPageTier(nullptr);
  }
  PrefixHit Lookup(int32_t n) const {
    return store_->lookups().Lookup(session_.id(), session_.model(), Tokens(n)).value();
  }
  // Drops all but the first `pages` of Tokens(160) from memory.
  void KeepInMemory(size_t pages) {
    TestSequence kept =
        TestSequence::Prompt(&session_, "full", Tokens(static_cast<int32_t>(pages) * 16 + 1));
    store_->eviction().Evict(false);
    ASSERT_TRUE(kept.Close().ok());
  }

  std::unique_ptr<Store> store_ = NewStore(SmallPools(64, 64));
  TestSession session_{store_.get()};
  KeysOnly tier_;
};

TEST_F(LookupTest, NamesTheTierOfEveryPage) {
  TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(100));
  ASSERT_TRUE(store_->moves().Move(s.id(), Tier::kHost).ok());
  TestSequence longer = TestSequence::Prompt(&session_, "full", Tokens(150));
  const PrefixHit hit = Lookup(161);
  EXPECT_EQ(hit.keys.size(), 10u);
  ASSERT_EQ(hit.pages.size(), 9u);
  for (size_t i = 0; i < 9; ++i) EXPECT_EQ(hit.pages[i], i < 6 ? kHost : kDevice) << i;
  EXPECT_EQ(hit.held_tokens(), 144u);
  EXPECT_EQ(hit.tokens_in(kHost), 96u);
  EXPECT_EQ(hit.tokens_in(kDevice), 48u);
  EXPECT_EQ(hit.tokens_in(kDisk), 0u);
}

TEST_F(LookupTest, GoesOnInTheTierBelowAndReadsNothing) {
  TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(161));
  const std::vector<PageKey> keys = Lookup(161).keys;
  ASSERT_TRUE(s.Close().ok());
  KeepInMemory(4);
  EXPECT_EQ(Lookup(161).held_tokens(), 64u) << "without a tier";
  store_->prefixes().SetPageTier(&tier_);
  tier_.keys = {keys.begin() + 4, keys.begin() + 8};
  for (int i = 0; i < 2; ++i) {  // idempotent
    const PrefixHit hit = Lookup(161);
    EXPECT_EQ(hit.held_tokens(), 128u);
    EXPECT_EQ(hit.tokens_in(kDevice), 64u);
    EXPECT_EQ(hit.tokens_in(kDisk), 64u);
  }
  EXPECT_EQ(store_->inspection().Counters().loaded_pages, 0u);
}

TEST_F(LookupTest, AHoleInMemoryIsFilledByTheTier) {
  TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(161));
  const std::vector<PageKey> keys = Lookup(161).keys;
  ASSERT_TRUE(s.Close().ok());
  store_->prefixes().SetPageTier(&tier_);
  tier_.keys.insert(keys[5]);
  KeepInMemory(5);
  // The end of the same prompt, behind a page that is on disk alone: a chain of its own.
  const PrefixHit tail =
      store_->lookups()
          .Lookup(session_.id(), session_.model(), std::vector<PageKey>{keys[4], keys[5], keys[3]})
          .value();
  EXPECT_EQ(tail.pages, (std::vector<Tier>{kDevice, kDisk, kDevice}));
}

TEST_F(LookupTest, KeysFindWhatTokensFind) {
  TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(161));
  const PrefixHit hit = Lookup(161);
  const PrefixHit by_keys =
      store_->lookups().Lookup(session_.id(), session_.model(), hit.keys).value();
  EXPECT_EQ(by_keys.pages, hit.pages);
  EXPECT_EQ(by_keys.keys, hit.keys);
}

TEST_F(LookupTest, AnotherTenantsKeysAreAMiss) {
  TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(161));
  const std::vector<PageKey> keys = Lookup(161).keys;
  TestSession stranger(store_.get(), "uid:2");
  EXPECT_TRUE(store_->lookups().Lookup(stranger.id(), stranger.model(), keys)->pages.empty());
  EXPECT_TRUE(store_->lookups().LookupFor("uid:2", session_.model(), keys)->pages.empty());
  EXPECT_TRUE(store_->lookups().LookupFor("uid:3", session_.model(), keys)->pages.empty());
}

TEST_F(LookupTest, AnOperatorLooksUpForATenantThatHasGone) {
  const uint64_t model = session_.model();
  {
    TestSequence s = TestSequence::Prompt(&session_, "full", Tokens(161));
    ASSERT_TRUE(s.Close().ok());
    store_->sessions().EndSession(session_.id(), SessionEnd::kDied);
  }
  EXPECT_EQ(store_->lookups().LookupFor("uid:1", model, Tokens(161))->held_tokens(), 160u);
  EXPECT_EQ(store_->lookups().LookupFor("uid:2", model, Tokens(161))->held_tokens(), 0u);
  EXPECT_EQ(store_->lookups().LookupFor("uid:1", 77, Tokens(161)).status().reason(),
            "MODEL_UNKNOWN");
}

TEST_F(LookupTest, RefusesWhatIsTooLong) {
  const std::vector<int32_t> tokens((size_t{1} << 24) + 1);
  const Status status = store_->lookups().Lookup(session_.id(), session_.model(), tokens).status();
  EXPECT_EQ(status.reason(), "SEQUENCE_TOO_LONG");
  EXPECT_EQ(status.message(), "tokens: 16777217; allowed: at most 16777216");
  EXPECT_EQ(session_.Open("full", tokens).status().message(), status.message());
}

}  // namespace
}  // namespace kvstrata::testing
