// SPDX-License-Identifier: Apache-2.0
// Tokens that are taken back: what is left is right, what others hold stays, and nothing leaks.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/fakes/copying_codec.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

class TruncateTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Store> store_ = NewStore(SmallPools(512, 0));
  std::unique_ptr<TestSession> session_ = std::make_unique<TestSession>(store_.get());

  uint32_t HeldOf(std::span<const int32_t> tokens) {
    return store_->lookups().Lookup(session_->id(), session_->model(), tokens)->held_tokens();
  }
};
INSTANTIATE_TEST_SUITE_P(Plans, TruncateTest, ::testing::Values("full", "quest", "chess"),
                         [](const auto& plan) { return std::string(plan.param); });

TEST_P(TruncateTest, WhatIsWrittenAnewIsFoundAndSoIsWhatWasTakenBack) {
  std::vector<int32_t> tokens = Tokens(600);
  TestSequence s = TestSequence::Prompt(session_.get(), GetParam(), tokens);
  for (const uint32_t cut : {599u, 590u, 520u, 513u, 512u, 100u, 0u}) {
    ASSERT_TRUE(s.Truncate(cut).ok());
    tokens.resize(cut);
    s.ExpectIntact();
    for (int32_t i = 0; i < 40; ++i) tokens.push_back(static_cast<int32_t>(cut) * 1000 + i);
    ASSERT_TRUE(s.Append(std::span(tokens).subspan(cut)).ok());
    s.ExpectIntact();
    TestSequence again = TestSequence::Prompt(session_.get(), GetParam(), tokens);
    EXPECT_EQ(again.opened().held_tokens, (tokens.size() - 1) / 16 * 16);
    again.ExpectIntact();
    ASSERT_TRUE(again.Close().ok());
    ExpectClean(*store_);
  }
  EXPECT_EQ(HeldOf(Tokens(600)), 592u) << "what was sealed before stays";
}

TEST_P(TruncateTest, AnythingInAnyOrder) {
  const auto seed = static_cast<unsigned>(std::random_device()());
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto any = [&random](size_t n) { return static_cast<uint32_t>(random() % (n + 1)); };
  std::vector<TestSequence> open = {TestSequence::Prompt(session_.get(), GetParam(), Tokens(100))};
  int32_t next = 1'000'000;
  for (int step = 0; step < 300; ++step) {
    TestSequence& s = open[any(open.size() - 1)];
    switch (any(3)) {
      case 0:
        ASSERT_TRUE(s.Truncate(any(s.size())).ok());
        break;
      case 1:
        if (open.size() == 6) {
          ASSERT_TRUE(s.Close().ok());
          open.erase(open.begin() + (&s - open.data()));
        } else {
          Result<TestSequence> fork = s.Fork();
          ASSERT_TRUE(fork.ok()) << fork.status().ToString();
          open.push_back(*fork);
        }
        break;
      default:
        if (s.size() < 700) {
          const std::vector<int32_t> more = Tokens(static_cast<int32_t>(any(60)), next += 100);
          ASSERT_TRUE(s.Append(more).ok());
        }
    }
    for (const TestSequence& each : open) each.ExpectIntact();
  }
  ExpectClean(*store_);
  for (TestSequence& s : open) ASSERT_TRUE(s.Close().ok());
  ExpectClean(*store_);
}

TEST_P(TruncateTest, GivesItsPagesBack) {
  TestSequence s = TestSequence::Prompt(session_.get(), GetParam(), Tokens(10));
  const uint64_t before = UsedBytes(*store_);
  // Never sealed: of a page each.
  for (int32_t i = 0; i < 40; ++i) {
    ASSERT_TRUE(s.Append(Tokens(5, i * 100)).ok());
    ASSERT_TRUE(s.Truncate(10).ok());
  }
  store_->references().Reclaim();
  EXPECT_EQ(UsedBytes(*store_), before);
  ASSERT_TRUE(s.Append(Tokens(1000)).ok());
  ASSERT_TRUE(s.Truncate(10).ok());
  store_->eviction().Evict(false);
  store_->references().Reclaim();
  EXPECT_LE(UsedBytes(*store_), before + 2 * 4096) << "what was sealed is cached, and may go";
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(TruncateTest, RefusalsNameWhatIsAllowed) {
  TestSequence s = TestSequence::Prompt(session_.get(), GetParam(), Tokens(100));
  const Status beyond = s.Truncate(101);
  EXPECT_EQ(beyond.reason(), "TRUNCATE_TOKENS");
  EXPECT_NE(beyond.message().find("tokens is 101; sequence"), std::string::npos);
  EXPECT_EQ(store_->sequences().Truncate(session_->id(), s.id(), 50, {}).reason(), "TRUNCATE_TAIL");
  EXPECT_EQ(store_->sequences().Truncate(session_->id(), s.id() + 1, 50, {}).reason(),
            "SEQUENCE_UNKNOWN");
  ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
  ASSERT_TRUE(s.Append(Tokens(30, 500)).ok());
  EXPECT_EQ(s.Truncate(99).reason(), "TRUNCATE_PROMPT");
  EXPECT_TRUE(s.Truncate(100).ok()) << "all that was generated";
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(TruncateTest, ReportsOfWhatIsTakenBackAreForgotten) {
  TestSequence s = TestSequence::Prompt(session_.get(), GetParam(), Tokens(64));
  const std::vector<float> surprisal(64, 1.0f);
  ASSERT_TRUE(store_->steps()
                  .Report(session_->id(), s.id(), 0, 64, surprisal.data(), nullptr, nullptr)
                  .ok());
  ASSERT_TRUE(s.Truncate(20).ok());
  std::vector<int32_t> tokens = Tokens(20);
  for (int32_t i = 0; i < 60; ++i) tokens.push_back(900 + i);
  ASSERT_TRUE(s.Append(std::span(tokens).subspan(20)).ok());
  const Result<OpenedSequence> again = session_->Open(GetParam(), tokens);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->held_tokens, 64u);
  EXPECT_EQ(again->surprisal_tokens, 20u) << "not those of the tokens before";
}

// Truncation with a codec that packs every row but the newest.
class TruncatePackedTest : public ::testing::Test {
 protected:
  TruncatePackedTest() {
    StoreOptions options = SmallPools(256, 256);
    options.new_recompressor = [this](const Plan& plan, const Geometry& geometry,
                                      ParametersPtr) -> std::unique_ptr<Recompressor> {
      if (plan.selector == SelectorKind::kFull) return nullptr;
      return std::make_unique<CopyingCodec>(control_, geometry);
    };
    store_ = NewStore(options);
    session_ = std::make_unique<TestSession>(store_.get());
  }

  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

TEST_F(TruncatePackedTest, PackedRowsAreNotCut) {
  TestSequence s = TestSequence::Prompt(session_.get(), "window", Tokens(100));
  ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  ASSERT_TRUE(s.Append(Tokens(60, 500)).ok());
  ASSERT_TRUE(s.Truncate(100).ok()) << "behind what is packed";
  s.ExpectIntact();
  ASSERT_TRUE(s.Append(Tokens(60, 700)).ok());
  s.ExpectIntact();
  while (Recompress(store_.get(), s.id()).ok()) {
  }
  const Status refused = s.Truncate(110);
  EXPECT_EQ(refused.reason(), "TRUNCATE_PACKED") << refused.ToString();
  s.ExpectIntact();
  ExpectClean(*store_);
}

// A codec whose last extents may go.
TEST_F(TruncatePackedTest, PackedRowsAreCutWhereTheyAreOnPagesToo) {
  for (const bool raw_stays : {false, true}) {
    const std::string plan =
        raw_stays ? "strata{keep_raw = \"host\"}" : "strata{keep_raw = \"no\"}";
    const int32_t first = raw_stays ? 1000 : 0;
    TestSequence s = TestSequence::Prompt(session_.get(), plan, Tokens(100, first));
    ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
    ASSERT_TRUE(s.Append(Tokens(60, first + 500)).ok());
    while (Recompress(store_.get(), s.id()).ok()) {
    }
    const Status cut = s.Truncate(110);
    EXPECT_EQ(cut.reason(), raw_stays ? "" : "TRUNCATE_PACKED") << cut.ToString();
    if (!raw_stays) continue;
    s.ExpectIntact();
    EXPECT_EQ(s.Table().extents(), 3u) << "up to 96";
    ASSERT_TRUE(s.Append(Tokens(50, 9000)).ok());
    ASSERT_TRUE(Recompress(store_.get(), s.id()).ok()) << "due again";
    s.ExpectIntact();
  }
  ExpectClean(*store_);
}

TEST_F(TruncatePackedTest, ARunOverWhatIsTakenBackPublishesNothing) {
  TestSequence s = TestSequence::Prompt(session_.get(), "window", Tokens(200));
  Result<RecompressJob> job = store_->recompression().TakeRecompression(s.id());
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  Result<RecompressOutput> ran = next->Run(job->input);
  ASSERT_TRUE(ran.ok());
  ASSERT_TRUE(s.Truncate(40).ok());
  ASSERT_TRUE(s.Append(Tokens(160, 9000)).ok());
  EXPECT_EQ(store_->recompression()
                .PublishRecompression(std::move(*job), std::move(next), std::move(*ran))
                .status()
                .reason(),
            "CANCELLED");
  s.ExpectIntact();
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok()) << "due again";
  s.ExpectIntact();
  ExpectClean(*store_);
}

// What TruncateKey allows stays possible until the owner does it.
TEST_F(TruncatePackedTest, WhatIsAskedForByKeyIsNotPackedBefore) {
  TestSequence s = TestSequence::Prompt(session_.get(), "window", Tokens(200));
  ASSERT_TRUE(store_->sequences().GiveKey(session_->id(), s.opened(), "a").ok());
  Result<RecompressJob> job = store_->recompression().TakeRecompression(s.id());
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  Result<RecompressOutput> ran = next->Run(job->input);
  ASSERT_TRUE(ran.ok());
  ASSERT_TRUE(store_->sequences().TruncateKey(session_->id(), "a", 40).ok());
  EXPECT_EQ(store_->recompression()
                .PublishRecompression(std::move(*job), std::move(next), std::move(*ran))
                .status()
                .reason(),
            "CANCELLED");
  EXPECT_EQ(store_->recompression().TakeRecompression(s.id()).status().reason(), "WORK_NOTHING");
  ASSERT_TRUE(s.Truncate(40).ok());
  ASSERT_TRUE(s.Append(Tokens(160, 9000)).ok());
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok()) << "due again";
  s.ExpectIntact();
  ExpectClean(*store_);
}

}  // namespace
}  // namespace kvstrata::testing
