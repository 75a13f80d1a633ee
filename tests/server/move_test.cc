// SPDX-License-Identifier: Apache-2.0
// How moves copy: many pages at once, and at a rate where that would cost a decode too much.
#include <gtest/gtest.h>

#include "server/store/options/copy_rate.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using std::chrono::microseconds;

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(CopyRate, CopiesOfAllThreadsShareIt) {
  CopyRate rate(100 * 1000000);  // a byte takes 10 ns
  const CopyRate::Clock::time_point now(microseconds(5000));
  EXPECT_EQ(rate.Begin(1000, now), now);
  EXPECT_EQ(rate.Begin(2000, now), now + microseconds(10));
  EXPECT_EQ(rate.Begin(1, now), now + microseconds(30));
  // What was not used before is not made up for.
  EXPECT_EQ(rate.Begin(1000, now + microseconds(500)), now + microseconds(500));
  EXPECT_EQ(rate.Begin(1000, now + microseconds(500)), now + microseconds(510));
}

TEST(CopyRate, ZeroIsNoLimit) {
  CopyRate rate(0);
  const CopyRate::Clock::time_point now(microseconds(5000));
  EXPECT_EQ(rate.Begin(uint64_t{1} << 50, now), now);
  EXPECT_EQ(rate.Begin(1, now), now);
  EXPECT_EQ(rate.burst_bytes(), 64 * kMiB);
}

TEST(CopyRate, BurstsAreShortAtALowRate) {
  EXPECT_EQ(CopyRate(256 * kMiB).burst_bytes(), kMiB);
  EXPECT_EQ(CopyRate(kMiB * kMiB).burst_bytes(), 64 * kMiB);
  EXPECT_EQ(CopyRate(1).burst_bytes(), 1u);
}

// Keeps how many copies came at once.
class CountingDevice final : public MemoryResource {
 public:
  explicit CountingDevice(std::vector<size_t>* batches) : batches_(batches) {}
  Result<MappedMemory> Allocate(uint64_t bytes) override { return upstream_->Allocate(bytes); }
  void Free(MappedMemory memory) override { upstream_->Free(std::move(memory)); }
  Status Copy(std::span<const MemoryCopy> copies) override {
    batches_->push_back(copies.size());
    return upstream_->Copy(copies);
  }
  MemoryTraits traits() const override { return {"counting"}; }

 private:
  std::vector<size_t>* const batches_;
  const std::unique_ptr<MemoryResource> upstream_ = NewEmulatedDevice();
};

class MoveTest : public ::testing::Test {
 protected:
  void Start(uint64_t promote_rate) {
    StoreOptions options = SmallPools(256, 256);
    options.promote_rate = promote_rate;
    Result<std::unique_ptr<Store>> store =
        Store::Create(options, std::make_unique<CountingDevice>(&batches_), NewHostMemory());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    session_ = std::make_unique<TestSession>(store_.get());
  }
  void Move(const TestSequence& s, Tier to) {
    const Result<MoveResult> moved = store_->moves().Move(s.id(), to);
    ASSERT_TRUE(moved.ok()) << moved.status().ToString();
    ASSERT_EQ(moved->pages, 100u);
    s.ExpectIntact();
    ExpectClean(*store_);
  }

  std::vector<size_t> batches_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

TEST_F(MoveTest, PagesAreCopiedAllAtOnce) {
  Start(0);
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(1600));
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) Move(s, tier);
  EXPECT_EQ(batches_, (std::vector<size_t>{100, 100}));
}

// At a byte a second it would take days.
TEST_F(MoveTest, WhileNoStepRunsThereIsNoLimit) {
  Start(1);
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(1600));
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) Move(s, tier);
}

TEST_F(MoveTest, BesideAStepPromotionKeepsToItsRate) {
  constexpr uint64_t kRate = 4 * kMiB;
  Start(kRate);
  TestSequence s = TestSequence::Prompt(session_.get(), "full", Tokens(1600));
  const int reader = session_->reader().Enter();
  Move(s, Tier::kHost);
  const auto begin = CopyRate::Clock::now();
  Move(s, Tier::kDevice);
  const std::chrono::duration<double> took = CopyRate::Clock::now() - begin;
  session_->reader().Leave(reader);
  // The first burst, of four pages, begins at once.
  EXPECT_GE(took.count(), 96 * 4096.0 / kRate);
}

}  // namespace
}  // namespace kvstrata::testing
