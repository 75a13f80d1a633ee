// SPDX-License-Identifier: Apache-2.0
// Chains of three tiers: one near, two far. A search goes on where the tier before knows nothing,
// and a load reads from each what the first that has it holds.
#include "server/work/tiers/tier_chain.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tests/fakes/far_tier.h"
#include "tests/fakes/memory_value_tier.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr int32_t kPrompt = 325;  // 20 pages and a bit
constexpr uint64_t kTierBytes = 16 << 20;

TierRowOptions Near() {
  TierRowOptions options;
  options.loads.load_timeout = seconds(60);  // a busy machine may take its time
  return options;
}

TierRowOptions Far() {
  TierRowOptions options = TierRowOptions::Far();
  options.searches->deadline = options.searches->deadline_most = seconds(60);
  options.searches->min_tokens = 16;
  options.writer.write = TierWrite::kAll;
  return options;
}

// A store over these tiers, which outlive it.
class Node {
 public:
  Node(MemoryValueTier* near, std::vector<FarTier*> far) : store_(NewStore(SmallPools(512, 64))) {
    if (near != nullptr) Add(Near(), near, nullptr);
    for (FarTier* const tier : far) Add(Far(), tier, near);
    session_ = std::make_unique<TestSession>(store_.get());
  }

  // Computes a prompt, and forgets it in memory when it is written everywhere.
  void Compute(std::span<const int32_t> tokens) {
    TestSequence s = TestSequence::Prompt(session_.get(), "full", tokens);
    const auto end = Clock::now() + seconds(60);
    for (const auto& row : rows_) {
      while (row->counters().waiting != 0) {
        ASSERT_LT(Clock::now(), end) << "a writer does not come to an end";
        std::this_thread::yield();
      }
    }
    ASSERT_TRUE(s.Close().ok());
    store_->eviction().Evict(false);
  }
  // How many tokens an open holds; each of them is right.
  uint32_t Held(std::span<const int32_t> tokens) {
    std::promise<Result<OpenedSequence>> answer;
    store_->openings().OpenSequence(
        session_->id(), session_->model(), "full", tokens,
        [&](const Result<OpenedSequence>& opened) { answer.set_value(opened); });
    const Result<OpenedSequence> opened = answer.get_future().get();
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    if (!opened.ok()) return 0;
    TestSequence s(session_.get(), *opened, tokens);
    s.ExpectIntact();
    EXPECT_TRUE(s.Close().ok());
    return opened->held_tokens;
  }
  PageKey Key(std::span<const int32_t> tokens, size_t page) {
    return store_->lookups().Lookup(session_->id(), session_->model(), tokens).value().keys[page];
  }
  TierRowCounters counters(size_t row) const { return rows_[row]->counters(); }

 private:
  void Add(const TierRowOptions& options, ValueTier* tier, ValueTier* above) {
    rows_.push_back(std::make_unique<TierRow>(options, store_.get(), tier, TierHooks{}, above));
    chain_.Add(rows_.back().get());
  }

  std::unique_ptr<Store> store_;
  std::vector<std::unique_ptr<TierRow>> rows_;
  TierChain chain_{store_.get()};
  std::unique_ptr<TestSession> session_;
};

class TierChainTest : public ::testing::Test {
 protected:
  MemoryValueTier near_{kTierBytes}, second_memory_{kTierBytes}, third_memory_{kTierBytes};
  FarTier second_{&second_memory_}, third_{&third_memory_};
};

TEST_F(TierChainTest, EachRowIsWrittenAndServesAlone) {
  Node(&near_, {&second_, &third_}).Compute(Tokens(kPrompt));
  for (const MemoryValueTier* const tier : {&near_, &second_memory_, &third_memory_}) {
    EXPECT_EQ(tier->Stats().entries, 20u);
  }
  EXPECT_EQ(Node(nullptr, {&second_}).Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(Node(nullptr, {&third_}).Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(Node(&near_, {}).Held(Tokens(kPrompt)), 320u);
}

// Eight pages are in the near tier, six more in the second, and all in the third.
TEST_F(TierChainTest, ALoadTakesItsPartFromEachRow) {
  Node(nullptr, {&third_}).Compute(Tokens(kPrompt));
  Node(nullptr, {&second_}).Compute(Tokens(14 * 16 + 5));
  Node(&near_, {}).Compute(Tokens(8 * 16 + 5));
  Node node(&near_, {&second_, &third_});
  EXPECT_EQ(node.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(node.counters(0).read, 8u);
  EXPECT_EQ(node.counters(1).read, 6u);
  EXPECT_EQ(node.counters(2).read, 6u);
  EXPECT_EQ(third_.probed(), 6u) << "it is asked for what the second has not";
}

TEST_F(TierChainTest, AThirdRowThatHasAllIsNotAskedWhereTheSecondHasIt) {
  Node(nullptr, {&second_, &third_}).Compute(Tokens(kPrompt));
  Node node(nullptr, {&second_, &third_});
  EXPECT_EQ(node.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(third_.probes(), 0u);
}

// What the second row loses, though it said that it has it, ends the prefix there.
TEST_F(TierChainTest, AHoleInARowEndsThePrefix) {
  Node(nullptr, {&third_}).Compute(Tokens(kPrompt));
  Node(nullptr, {&second_}).Compute(Tokens(10 * 16 + 5));
  Node node(nullptr, {&second_, &third_});
  second_.Lose(TierNameOf(node.Key(Tokens(kPrompt), 3)));
  EXPECT_EQ(node.Held(Tokens(kPrompt)), 3 * 16u);
  EXPECT_EQ(node.counters(1).read, 0u) << "what lies behind is of no use";
}

TEST_F(TierChainTest, TheLeastThatARowIsAskedForIsTheChains) {
  Node(nullptr, {&third_}).Compute(Tokens(kPrompt));
  Node node(nullptr, {&second_, &third_});
  EXPECT_EQ(node.Held(Tokens(15)), 0u);
  EXPECT_EQ(second_.probes(), 0u);
  EXPECT_EQ(node.Held(Tokens(kPrompt)), 320u);
  EXPECT_EQ(second_.probes(), 1u);
  EXPECT_EQ(third_.probes(), 1u);
}

}  // namespace
}  // namespace kvstrata::testing
