// SPDX-License-Identifier: Apache-2.0
// TierRow over a tier that is no disk and has nothing beyond the interface: whatever works here
// needs no engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "server/work/tiers/pin_records.h"
#include "server/work/tiers/tier_chain.h"
#include "server/work/tiers/value_catalog.h"
#include "tests/fakes/memory_value_tier.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int32_t kPrompt = 325;  // 20 pages and a bit

class TierPagesInMemory : public ::testing::Test {
 protected:
  void Start(const TierRowOptions& options = {}) {
    store_ = NewStore(SmallPools(256, 64));
    pages_ = std::make_unique<TierRow>(options, store_.get(), &tier_, TierHooks{});
    tiers_ = std::make_unique<TierChain>(store_.get());
    tiers_->Add(pages_.get());
    session_ = std::make_unique<TestSession>(store_.get());
  }
  void Settle() const {
    const auto end = Clock::now() + seconds(30);
    while (pages_->counters().waiting != 0) {
      ASSERT_LT(Clock::now(), end) << "the writer does not come to an end";
      std::this_thread::yield();
    }
  }
  // A prompt that is in the tier and no longer in memory.
  void Write() {
    TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(kPrompt));
    Settle();
    ASSERT_TRUE(s.Close().ok());
    store_->eviction().Evict(false);
  }
  uint32_t Held() {
    std::promise<Result<OpenedSequence>> answer;
    store_->openings().OpenSequence(
        session_->id(), session_->model(), "full", Tokens(kPrompt),
        [&](const Result<OpenedSequence>& opened) { answer.set_value(opened); });
    const Result<OpenedSequence> opened = answer.get_future().get();
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    if (!opened.ok()) return 0;
    TestSequence s(session_.get(), *opened, Tokens(kPrompt));
    s.ExpectIntact();
    EXPECT_TRUE(s.Close().ok());
    return opened->held_tokens;
  }

  MemoryValueTier tier_{16 << 20};
  std::unique_ptr<Store> store_;
  std::unique_ptr<TierRow> pages_;
  std::unique_ptr<TierChain> tiers_;
  std::unique_ptr<TestSession> session_;
};

TEST_F(TierPagesInMemory, WhatLeftMemoryComesBack) {
  Start();
  Write();
  EXPECT_EQ(pages_->counters().written, 20u);
  EXPECT_EQ(tier_.Stats().entries, 20u);
  EXPECT_EQ(Held(), 320u);
  EXPECT_EQ(pages_->counters().read, 20u);
  ExpectClean(*store_);
}

TEST_F(TierPagesInMemory, ADamagedPageEndsThePrefix) {
  Start();
  Write();
  const std::vector<PageKey> keys =
      store_->lookups().Lookup(session_->id(), session_->model(), Tokens(kPrompt)).value().keys;
  tier_.Damage(TierNameOf(keys[5]));
  EXPECT_EQ(Held(), 80u);
  EXPECT_EQ(tier_.Stats().damaged, 1u);
}

TEST_F(TierPagesInMemory, ATierThatDoesNotAnswerDelaysNobodyBeyondTheDeadline) {
  TierRowOptions options;
  options.loads.load_timeout = milliseconds(20);
  Start(options);
  Write();
  tier_.Hold();
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(pages_->counters().late_loads, 1u);
  tier_.Release();
}

// A stop cancels what the tier has not done, instead of waiting for it.
TEST_F(TierPagesInMemory, AStopCancelsWhatTheTierHolds) {
  Start();
  Write();
  tier_.Hold();
  TestSequence::Prompt(session_.get(), "full", Tokens(100, 50'000));
  std::promise<void> opened;
  store_->openings().OpenSequence(session_->id(), session_->model(), "full", Tokens(kPrompt),
                                  [&](const Result<OpenedSequence>& o) {
                                    EXPECT_EQ(o->held_tokens, 0u);
                                    opened.set_value();
                                  });
  const auto began = Clock::now();
  pages_->Stop();
  EXPECT_LT(Clock::now() - began, seconds(9)) << "a put may take ten";
  opened.get_future().wait();
  const TierRowCounters counters = pages_->counters();
  EXPECT_EQ(counters.dropped() + counters.gone, 6u);
  EXPECT_EQ(counters.failed, 0u);
  tier_.Release();
}

TEST_F(TierPagesInMemory, ADrainNeedsNoCheckpoint) {
  Start();
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(kPrompt));
  ASSERT_TRUE(pages_->writer().queue().Drain().ok());
  const auto end = Clock::now() + seconds(30);
  while (!pages_->writer().queue().drained()) {
    ASSERT_LT(Clock::now(), end);
    std::this_thread::yield();
  }
  EXPECT_EQ(tier_.Stats().entries, 20u);
  TestSequence other = TestSequence::Prompt(session_.get(), "full", Tokens(100, 50'000));
  EXPECT_EQ(pages_->counters().refused, 6u);
  pages_->writer().Resume();
  Settle();
  EXPECT_EQ(tier_.Stats().entries, 26u);
}

TEST_F(TierPagesInMemory, PinsAndRecordsAreRead) {
  Start();
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(kPrompt));
  Settle();
  ASSERT_TRUE(store_->pins().PinSequence(s.id(), std::chrono::hours(1)).ok());
  const std::vector<PrefixPin> pins = ReadPins(&tier_, Clock::now() + seconds(30));
  ASSERT_EQ(pins.size(), 1u);
  EXPECT_EQ(pins[0].tokens(), 320u);
  ASSERT_TRUE(ErasePin(&tier_, pins[0].id, Clock::now() + seconds(30)).ok());
  EXPECT_TRUE(ReadPins(&tier_, Clock::now() + seconds(30)).empty());
  std::promise<size_t> records;
  NoteRecords(store_.get(), &tier_, pages_.get(), [&](size_t n) { records.set_value(n); });
  EXPECT_EQ(records.get_future().get(), 0u);
}

TEST_F(TierPagesInMemory, AScrubAndAnOperatorFindTheDamage) {
  Start();
  Write();
  const ValueCatalog catalog(store_.get(), &tier_);
  const ValueList list = catalog.List({}, 0, 100);
  ASSERT_EQ(list.values.size(), 20u);
  EXPECT_TRUE(catalog.Get(list.values[0].key).ok());
  tier_.Damage(list.values[0].key);
  tier_.Damage(list.values[1].key);
  EXPECT_EQ(catalog.Verify(list.values[0].key).value().state, ValueState::kCorrupt);
  ScrubProgress last;
  std::promise<Status> end;
  TierScrub scrub;
  scrub.progress = [&last](const ScrubProgress& p) {
    last = p;
    return true;
  };
  scrub.done = [&end](const Status& why) { end.set_value(why); };
  ASSERT_TRUE(pages_->scrubs().Begin(std::move(scrub)).ok());
  EXPECT_TRUE(end.get_future().get().ok());
  EXPECT_EQ(last.values, 19u);
  EXPECT_EQ(last.corrupt, 1u);
  EXPECT_EQ(tier_.Stats().entries, 18u);
}

}  // namespace
}  // namespace kvstrata::testing
