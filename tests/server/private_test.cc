// SPDX-License-Identifier: Apache-2.0
// Private sequences: they find nothing, nobody finds anything of them, no tier hears of them, and
// their memory comes back when they close. One that becomes private keeps what it had shown.
#include <future>
#include <set>

#include "tests/fakes/copying_codec.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

constexpr int32_t kPrompt = 164;  // ten pages, and a tail
constexpr uint32_t kWhole = 160;

// Counts what it is told of, and what it is asked for.
class CountingTier final : public PageTier {
 public:
  void Offer(const TierOffer& offer) override {
    offered.insert(offer.key);
    reported += offer.why == OfferedFor::kReported;
  }
  bool Search(TierSearch search) override {
    searched += search.keys.size();
    return false;
  }
  bool Holds(const PageKey&) const override { return false; }
  bool Load(TierLoad) override { return false; }
  Status Pin(const PrefixPin&) override { return OkStatus(); }
  Status Unpin(const PrefixPin&, bool) override { return OkStatus(); }
  std::set<PageKey> offered;
  int reported = 0;  // offers because more was reported
  size_t searched = 0;
};

// Plans "full" have no codec; all others recompress by copies.
class PrivateTest : public ::testing::TestWithParam<const char*> {
 protected:
  PrivateTest() {
    StoreOptions options = SmallPools(256, 64);
    options.recompress_retry = std::chrono::microseconds(0);
    options.new_recompressor = [this](const Plan& plan, const Geometry& geometry,
                                      ParametersPtr) -> std::unique_ptr<Recompressor> {
      if (plan.selector != SelectorKind::kWindow) return nullptr;
      return std::make_unique<CopyingCodec>(control_, geometry);
    };
    store_ = NewStore(options);
    store_->prefixes().SetPageTier(&tier_, 0);
    session_ = std::make_unique<TestSession>(store_.get());
    other_ = std::make_unique<TestSession>(store_.get());
  }
  ~PrivateTest() override {
    ExpectClean(*store_);
    store_->prefixes().SetPageTier(nullptr);
  }

  TestSequence Open(TestSession* session, bool private_pages, int32_t n = kPrompt) {
    const std::vector<int32_t> tokens = Tokens(n);
    OpenOptions options;
    options.private_pages = private_pages;
    std::promise<Result<OpenedSequence>> answer;
    store_->openings().OpenSequence(
        session->id(), session->model(), GetParam(), tokens,
        [&](const Result<OpenedSequence>& o) { answer.set_value(o); }, options);
    const Result<OpenedSequence> opened = answer.get_future().get();
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    TestSequence s(session, *opened, tokens);
    EXPECT_TRUE(s.Append(std::span(tokens).subspan(opened->held_tokens)).ok());
    return s;
  }
  // The end of its prompt, and all that a worker makes of it.
  void Finish(TestSession* session, const TestSequence& s) {
    ASSERT_TRUE(store_->steps().PrefillDone(session->id(), s.id()).ok());
    while (Recompress(store_.get(), s.id()).ok()) {
    }
  }
  SequenceInfo Info(const TestSequence& s) const { return store_->inspection().Show(s.id())->info; }
  void ExpectNothingIsThere() {
    for (const std::string plan : {"", GetParam()}) {
      EXPECT_EQ(store_->lookups()
                    .Lookup(other_->id(), other_->model(), Tokens(kPrompt), {plan, ""})
                    ->held_tokens(),
                0u);
    }
    TestSequence s = Open(other_.get(), false, 1);
    EXPECT_EQ(s.opened().held_tokens, 0u);
    ASSERT_TRUE(s.Close().ok());
    EXPECT_EQ(tier_.offered.size(), 0u);
    EXPECT_EQ(store_->inspection().Counters().artefacts, 0u);
    EXPECT_EQ(store_->inspection().Counters().prefix_pages, 0u);
  }
  uint64_t UsedAtRest() {
    store_->references().Reclaim();
    return UsedBytes(*store_);
  }

  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  CountingTier tier_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_, other_;
};
INSTANTIATE_TEST_SUITE_P(Plans, PrivateTest,
                         ::testing::Values("full", "quest{page = 16}", "window"),
                         [](const auto& plan) {
                           return std::string(plan.param, strcspn(plan.param, "{"));
                         });

TEST_P(PrivateTest, NobodyFindsAnythingOfIt) {
  TestSequence s = Open(session_.get(), true);
  Finish(session_.get(), s);
  EXPECT_TRUE(Info(s).private_pages);
  ExpectNothingIsThere();
  TestSequence beside = Open(session_.get(), false);
  EXPECT_EQ(beside.opened().held_tokens, 0u);
  beside.ExpectIntact();
  s.ExpectIntact();
}

TEST_P(PrivateTest, ItsMemoryComesBackWhenItCloses) {
  TestSequence s = Open(session_.get(), true);
  Finish(session_.get(), s);
  ASSERT_TRUE(s.Close().ok());
  EXPECT_EQ(UsedAtRest(), 0u) << "without an eviction";
  ExpectNothingIsThere();
}

TEST_P(PrivateTest, ItFindsNothingAndAsksNobody) {
  TestSequence shown = Open(other_.get(), false);
  Finish(other_.get(), shown);
  ASSERT_TRUE(shown.Close().ok());
  const size_t offered = tier_.offered.size(), searched = tier_.searched;
  ASSERT_GT(offered, 0u);
  TestSequence s = Open(session_.get(), true);
  EXPECT_EQ(s.opened().held_tokens, 0u);
  EXPECT_EQ(s.opened().indexed_tokens, 0u);
  Finish(session_.get(), s);
  EXPECT_EQ(store_->inspection().Counters().artefact_hits, 0u);
  EXPECT_EQ(tier_.offered.size(), offered);
  EXPECT_EQ(tier_.searched, searched);
  s.ExpectIntact();
  TestSequence again = Open(other_.get(), false);
  EXPECT_EQ(again.opened().held_tokens, kWhole) << "what was shown stays found";
}

TEST_P(PrivateTest, ForksAndWhatIsLeftOfItArePrivateToo) {
  TestSequence s = Open(session_.get(), true);
  Result<TestSequence> fork = s.Fork();
  ASSERT_TRUE(fork.ok()) << fork.status().ToString();
  EXPECT_TRUE(Info(*fork).private_pages);
  ASSERT_TRUE(s.Truncate(40).ok());
  ASSERT_TRUE(s.Append(Tokens(kPrompt - 40, 40)).ok());
  ASSERT_TRUE(fork->Append(Tokens(40, kPrompt)).ok());
  Finish(session_.get(), s);
  Finish(session_.get(), *fork);
  s.ExpectIntact();
  fork->ExpectIntact();
  ExpectNothingIsThere();
  ASSERT_TRUE(s.Close().ok());
  fork->ExpectIntact();
  ASSERT_TRUE(fork->Close().ok());
  EXPECT_EQ(UsedAtRest(), 0u);
  ExpectNothingIsThere();
}

TEST_P(PrivateTest, WhatIsReportedOfItStaysItsOwn) {
  TestSequence shown = Open(other_.get(), false);
  TestSequence s = Open(session_.get(), true);
  const std::vector<float> surprisal(kPrompt, 2.5f);
  ASSERT_TRUE(store_->steps()
                  .Report(session_->id(), s.id(), 0, kPrompt, surprisal.data(), nullptr, nullptr)
                  .ok());
  TestSequence next = Open(other_.get(), false);
  ASSERT_EQ(next.opened().held_tokens, kWhole);
  EXPECT_EQ(next.opened().surprisal_tokens, 0u);
}

TEST_P(PrivateTest, APinOfItIsRefused) {
  const TestSequence s = Open(session_.get(), true);
  EXPECT_EQ(store_->pins().PinSequence(s.id(), std::chrono::hours(1)).status().reason(),
            "PIN_PRIVATE");
  EXPECT_EQ(store_->pins()
                .PinPrefix("uid:1", session_->model(), Tokens(kPrompt), std::chrono::hours(1))
                .status()
                .reason(),
            "PIN_MISS");
}

TEST_P(PrivateTest, ABuildForOthersIsRefused) {
  const TestSequence s = Open(session_.get(), true);
  const Result<BuildResult> built =
      store_->builds().Build({session_->id(), s.id(), "quest{page = 32}"}, nullptr);
  EXPECT_EQ(built.status().reason(), "BUILD_PRIVATE");
}

// Rows that turned out wrong are found by nobody, those before them by whoever found them before.
TEST_P(PrivateTest, OneThatBecomesPrivateKeepsWhatItHadShown) {
  TestSequence s = Open(session_.get(), false, 80);
  ASSERT_TRUE(store_->sequences().MakePrivate(session_->id(), s.id()).ok());
  ASSERT_TRUE(store_->sequences().MakePrivate(session_->id(), s.id()).ok());
  const size_t offered = tier_.offered.size();
  ASSERT_TRUE(s.Append(Tokens(kPrompt - 80, 80)).ok());
  const std::vector<float> surprisal(kPrompt, 2.5f);
  const int reported = tier_.reported;
  ASSERT_TRUE(store_->steps()
                  .Report(session_->id(), s.id(), 0, kPrompt, surprisal.data(), nullptr, nullptr)
                  .ok());
  Finish(session_.get(), s);
  s.ExpectIntact();
  EXPECT_EQ(tier_.offered.size(), offered);
  EXPECT_EQ(tier_.reported, reported);
  EXPECT_EQ(store_->inspection().Counters().artefacts, 0u);
  const auto held = [&] {
    return store_->lookups().Lookup(other_->id(), other_->model(), Tokens(kPrompt))->held_tokens();
  };
  EXPECT_LE(held(), 80u) << "a codec may have released the raw rows of those";
  ASSERT_TRUE(s.Close().ok());
  EXPECT_LE(held(), 80u);
  TestSequence again = Open(other_.get(), false);
  again.ExpectIntact();
}

TEST_P(PrivateTest, SomebodyElsesSequenceIsNotMadePrivate) {
  TestSequence s = Open(session_.get(), false);
  EXPECT_EQ(store_->sequences().MakePrivate(other_->id(), s.id()).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_FALSE(Info(s).private_pages);
}

// The same tokens under two private chains, and under the model's own: three keys.
TEST(PrivateKeys, AreNobodyElses) {
  const KeyChain chain("uid:1", SmallModel());
  std::set<PageKey> keys{chain.Next({}, Tokens(16))};
  for (const KeyChain& own : {chain.Private(), chain.Private()}) {
    keys.insert(own.Next({}, Tokens(16)));
    EXPECT_EQ(own.Next({}, Tokens(16)), own.Next({}, Tokens(16)));
  }
  EXPECT_EQ(keys.size(), 3u);
}

}  // namespace
}  // namespace kvstrata::testing
