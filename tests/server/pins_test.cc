// SPDX-License-Identifier: Apache-2.0
// Pins: what they keep, how long, and against whom; and the books under random use.
#include <chrono>
#include <map>
#include <random>
#include <set>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::minutes;
using Time = std::chrono::steady_clock::time_point;

// Says what it was told, and fails when asked to.
class RecordingTier final : public PageTier {
 public:
  void Offer(const TierOffer&) override {}
  bool Search(TierSearch) override { return false; }
  bool Holds(const PageKey&) const override { return false; }
  bool Load(TierLoad) override { return false; }
  Status Pin(const PrefixPin& pin) override {
    if (!answer.ok()) return answer;
    kept.insert(pin.id);
    recorded.insert(pin.id);
    return OkStatus();
  }
  Status Unpin(const PrefixPin& pin, bool forget) override {
    kept.erase(pin.id);
    if (forget) recorded.erase(pin.id);
    return OkStatus();
  }
  std::set<uint64_t> kept, recorded;
  Status answer;
};

class PinsTest : public ::testing::Test {
 protected:
  explicit PinsTest(StoreOptions options = SmallPools(64, 64)) {
    options.now = [this] { return now_; };
    store_ = NewStore(options);
    session_ = std::make_unique<TestSession>(store_.get());
  }
  ~PinsTest() override {
    ExpectClean(*store_);
    store_->prefixes().SetPageTier(nullptr);
  }
  // A prompt that nobody uses any more.
  void Cache(int32_t n, int32_t first = 0) {
    TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(n, first));
    ASSERT_TRUE(s.Close().ok());
  }
  Result<PinInfo> Pin(int32_t n, int32_t first = 0, microseconds ttl = hours(1)) {
    return store_->pins().PinPrefix("uid:1", session_->model(), Tokens(n, first), ttl);
  }
  uint32_t Held(int32_t n, int32_t first = 0) {
    return store_->lookups()
        .Lookup(session_->id(), session_->model(), Tokens(n + 1, first))
        ->held_tokens();
  }

  Time now_ = std::chrono::steady_clock::now();
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
  RecordingTier tier_;
};

TEST_F(PinsTest, AnEvictionSparesWhatIsPinned) {
  Cache(160);
  Cache(160, 1000);
  const Result<PinInfo> pin = Pin(100);
  ASSERT_TRUE(pin.ok()) << pin.status().ToString();
  EXPECT_EQ(pin->pin.tokens(), 96u);
  EXPECT_EQ(pin->pin.bytes, 6 * 4096u);
  EXPECT_EQ(pin->device_pages, 6u);
  EXPECT_EQ(pin->ttl_left, hours(1));
  const EvictResult dry = store_->eviction().Evict(true);
  EXPECT_EQ(dry.pages(), 14u);
  EXPECT_EQ(dry.tiers[0].pinned_bytes, 6 * 4096u);
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 14u);
  EXPECT_EQ(Held(160), 96u);
  EXPECT_EQ(Held(160, 1000), 0u);
  EXPECT_EQ(store_->inspection().Pools()[0].pinned_bytes, 6 * 4096u);
  EXPECT_EQ(store_->inspection().Pools()[0].cached_bytes, 0u);
  EXPECT_EQ(store_->inspection().Counters().evicted_pages, 14u);
}

TEST_F(PinsTest, AShortageSparesWhatIsPinned) {
  Cache(320);
  ASSERT_TRUE(Pin(320).ok());
  for (int32_t i = 1; i < 12; ++i) Cache(30 * 16, i * 1000);  // more than both pools have
  EXPECT_EQ(Held(320), 320u);
  EXPECT_GT(store_->inspection().Counters().evicted_pages, 100u);
}

TEST_F(PinsTest, ItEndsWithItsTimeAndWithoutAClient) {
  store_->prefixes().SetPageTier(&tier_);
  Cache(160);
  const uint64_t pin = Pin(160, 0, minutes(10))->pin.id;
  store_->sessions().EndSession(session_->id(), SessionEnd::kDied);
  now_ += minutes(10) - microseconds(1);
  store_->pins().ExpirePins();
  ASSERT_EQ(store_->pins().Pins().size(), 1u);
  EXPECT_EQ(store_->pins().Pins()[0].ttl_left, microseconds(1));
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 0u);
  now_ += microseconds(1);
  store_->pins().ExpirePins();
  EXPECT_TRUE(store_->pins().Pins().empty());
  EXPECT_TRUE(tier_.kept.empty());
  EXPECT_TRUE(tier_.recorded.contains(pin)) << "expiring does no I/O";
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 10u);
  EXPECT_EQ(store_->pins().RemovePin(pin).reason(), "PIN_UNKNOWN");
}

TEST_F(PinsTest, ASequenceIsPinnedWithItsIndex) {
  const auto tokens = Tokens(1100);
  StoreOptions options = SmallPools(256, 64);
  options.now = [this] { return now_; };
  session_.reset();
  store_ = NewStore(options);
  session_ = std::make_unique<TestSession>(store_.get());
  TestSequence s = TestSequence::Prompt(session_.get(), "quest{min_tokens = 0}", tokens);
  ASSERT_TRUE(s.Append(5000).ok());
  const Result<PinInfo> pin = store_->pins().PinSequence(s.id(), hours(1));
  ASSERT_TRUE(pin.ok()) << pin.status().ToString();
  EXPECT_EQ(pin->pin.tokens(), 1088u);
  EXPECT_GT(pin->pin.index_blocks.size(), 0u);
  ASSERT_TRUE(s.Close().ok());
  store_->eviction().Evict(false);
  const Result<OpenedSequence> again = session_->Open("quest{min_tokens = 0}", tokens);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->held_tokens, 1088u);
  EXPECT_GT(again->indexed_tokens, 0u);
}

TEST_F(PinsTest, PinsOfTheSamePagesAddUp) {
  Cache(160);
  const uint64_t first = Pin(160)->pin.id, second = Pin(80)->pin.id;
  ASSERT_TRUE(store_->pins().RemovePin(first).ok());
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 5u);
  EXPECT_EQ(Held(160), 80u);
  ASSERT_TRUE(store_->pins().RemovePin(second).ok());
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 5u);
}

TEST_F(PinsTest, AMoveTakesThePinAlong) {
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(160));
  ASSERT_TRUE(Pin(160).ok());
  ASSERT_TRUE(store_->moves().Move(s.id(), Tier::kHost).ok());
  ASSERT_TRUE(s.Close().ok());
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 0u);
  EXPECT_EQ(store_->pins().Pins()[0].host_pages, 10u);
}

TEST_F(PinsTest, RefusesWhatItCannotKeep) {
  Cache(160);
  EXPECT_EQ(Pin(160, 0, microseconds(1)).status().reason(), "PIN_TTL");
  EXPECT_EQ(Pin(160, 0, hours(24 * 367)).status().reason(), "PIN_TTL");
  EXPECT_EQ(Pin(160, 7000).status().reason(), "PIN_MISS");
  EXPECT_EQ(
      store_->pins().PinPrefix("uid:2", session_->model(), Tokens(160), hours(1)).status().reason(),
      "PIN_MISS");
  EXPECT_EQ(store_->pins().PinSequence(99, hours(1)).status().reason(), "SEQUENCE_UNKNOWN");
  TestSequence small = TestSequence::Prompt(session_.get(), "full", Tokens(9, 50));
  EXPECT_EQ(store_->pins().PinSequence(small.id(), hours(1)).status().reason(), "PIN_NOTHING");
  // Half of both pools: 64 pages.
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(Pin(160).ok());
  EXPECT_EQ(Pin(160).status().reason(), "PIN_LIMIT");
  EXPECT_EQ(store_->pins().PinUse().used_bytes, 60 * 4096u);
  EXPECT_EQ(store_->pins().PinUse().limit_bytes, 64 * 4096u);
  StoreSettings settings;
  settings.pin_limit_bytes = 32 * 4096;
  store_->Apply(settings);
  EXPECT_EQ(store_->pins().PinUse().limit_bytes, 32 * 4096u);
  EXPECT_EQ(store_->pins().PinUse().used_bytes, 60 * 4096u) << "what is pinned stays";
  EXPECT_EQ(Pin(16).status().reason(), "PIN_LIMIT");
  settings.pin_limit_bytes = 0;
  store_->Apply(settings);
  EXPECT_TRUE(Pin(64).ok());
  EXPECT_EQ(Pin(16).status().reason(), "PIN_LIMIT");
}

TEST_F(PinsTest, WhatTheTierCannotKeepIsNotPinned) {
  store_->prefixes().SetPageTier(&tier_);
  Cache(160);
  tier_.answer = ResourceExhausted("DISK_FULL", "no");
  EXPECT_EQ(Pin(160).status().reason(), "DISK_FULL");
  EXPECT_TRUE(store_->pins().Pins().empty());
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 10u);
}

TEST_F(PinsTest, ARestoredPinKeepsWhatComesLater) {
  Cache(160);
  PrefixPin pin = Pin(160)->pin;
  ASSERT_TRUE(store_->pins().RemovePin(pin.id).ok());
  store_->eviction().Evict(false);
  pin.id = 41;
  store_->pins().RestorePins({pin});
  Cache(320);
  store_->eviction().Evict(false);
  EXPECT_EQ(Held(320), 160u);
  EXPECT_EQ(Pin(16)->pin.id, 42u);
}

// Random opens, appends, forks, moves, closes, pins, expiries and evictions, in pools that are too
// small: the books are clean at every step, and what was held when it was pinned is held until its
// time is over.
TEST_F(PinsTest, UnderRandomUseNothingPinnedIsEverGone) {
  const auto seed = static_cast<uint32_t>(std::random_device{}());
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&random](uint32_t n) { return static_cast<int32_t>(random() % n); };
  std::vector<TestSequence> open;
  struct Kept {
    int32_t tokens, first;
    Time expires;
  };
  std::map<uint64_t, Kept> pins;
  uint32_t pinned = 0, expired = 0;
  for (int step = 0; step < 1500; ++step) {
    const int32_t first = below(6) * 1000, n = 16 * (1 + below(12));
    switch (below(8)) {
      case 0:
      case 1: {
        const auto tokens = Tokens(n + below(16), first);
        const Result<OpenedSequence> opened = session_->Open("full", tokens);
        if (!opened.ok()) break;
        open.emplace_back(session_.get(), *opened, tokens);
        (void)open.back().Append(std::span(tokens).subspan(opened->held_tokens));
        break;
      }
      case 2:
      case 3:
        if (open.empty()) break;
        std::swap(open[static_cast<size_t>(below(open.size()))], open.back());
        open.back().ExpectIntact();
        ASSERT_TRUE(open.back().Close().ok());
        open.pop_back();
        break;
      case 4: {
        const microseconds ttl = minutes(1 + below(30));
        const Result<PinInfo> pin = Pin(n, first, ttl);
        if (!pin.ok()) {
          ASSERT_TRUE(pin.status().reason() == "PIN_MISS" || pin.status().reason() == "PIN_LIMIT");
          break;
        }
        pins[pin->pin.id] = {static_cast<int32_t>(pin->pin.tokens()), first, now_ + ttl};
        ++pinned;
        break;
      }
      case 5:
        (void)store_->eviction().Evict(below(3) == 0);
        break;
      case 6:
        now_ += minutes(below(5));
        store_->pins().ExpirePins();
        expired += std::erase_if(pins, [this](const auto& p) { return p.second.expires <= now_; });
        break;
      case 7:
        if (!open.empty()) {
          (void)store_->moves().Move(open.back().id(), below(2) == 0 ? Tier::kHost : Tier::kDevice);
        }
        if (!pins.empty() && below(4) == 0) {
          ASSERT_TRUE(store_->pins().RemovePin(pins.begin()->first).ok());
          pins.erase(pins.begin());
        }
        break;
    }
    for (const auto& [id, kept] : pins) {
      ASSERT_GE(Held(kept.tokens, kept.first), static_cast<uint32_t>(kept.tokens))
          << "step " << step << ", pin " << id;
    }
    ASSERT_EQ(store_->pins().Pins().size(), pins.size());
    const std::vector<std::string> findings = store_->inspection().Audit().findings;
    ASSERT_TRUE(findings.empty()) << "step " << step << ": " << findings.front();
  }
  EXPECT_GT(pinned, 50u);
  EXPECT_GT(expired, 20u);
  EXPECT_GT(store_->inspection().Counters().evicted_pages, 100u);
}

}  // namespace
}  // namespace kvstrata::testing
