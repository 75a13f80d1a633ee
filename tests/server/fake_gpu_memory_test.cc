// SPDX-License-Identifier: Apache-2.0
// A store whose device pool the daemon cannot touch (a GPU's): every way that its bytes take.
#include <gtest/gtest.h>

#include "kernels/codec/codec.h"
#include "tests/kernels/verify_extent.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

class FakeGpuMemoryTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Store>> store = Store::Create(
        SmallPools(512, 512), std::make_unique<FakeGpuMemory>(copies_fail_), NewHostMemory());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    session_ = std::make_unique<TestSession>(store_.get());
  }

  std::shared_ptr<std::atomic<bool>> copies_fail_ = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

INSTANTIATE_TEST_SUITE_P(Plans, FakeGpuMemoryTest, ::testing::Values("full", "quest"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(FakeGpuMemoryTest, AForkWritesACopyOfTheTail) {
  TestSequence parent = TestSequence::Prompt(session_.get(), GetParam(), Tokens(39));
  Result<TestSequence> child = parent.Fork();
  ASSERT_TRUE(child.ok()) << child.status().ToString();
  ASSERT_TRUE(child->Append(Tokens(30, 1000)).ok());
  ASSERT_TRUE(parent.Append(Tokens(30, 2000)).ok());
  parent.ExpectIntact();
  child->ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(FakeGpuMemoryTest, PagesMoveToTheHostAndBack) {
  TestSequence s = TestSequence::Prompt(session_.get(), GetParam(), Tokens(100));
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
    const Result<MoveResult> moved = store_->moves().Move(s.id(), tier);
    ASSERT_TRUE(moved.ok()) << moved.status().ToString();
    EXPECT_EQ(moved->pages, 6u);
    s.ExpectIntact();
  }
  ASSERT_TRUE(s.Append(Tokens(20, 100)).ok());
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(FakeGpuMemoryTest, AFailedCopyChangesNothing) {
  TestSequence parent = TestSequence::Prompt(session_.get(), GetParam(), Tokens(39));
  Result<TestSequence> child = parent.Fork();
  ASSERT_TRUE(child.ok()) << child.status().ToString();
  const uint64_t used = UsedBytes(*store_);
  *copies_fail_ = true;
  EXPECT_EQ(child->Append(Tokens(1, 1000)).reason(), "COPY_FAILED");
  EXPECT_EQ(store_->moves().Move(parent.id(), Tier::kHost).status().reason(), "COPY_FAILED");
  store_->references().Reclaim();
  EXPECT_EQ(UsedBytes(*store_), used);
  *copies_fail_ = false;
  ASSERT_TRUE(child->Append(Tokens(1, 1000)).ok());
  parent.ExpectIntact();
  child->ExpectIntact();
  ExpectClean(*store_);
}

class GpuRecompression : public ::testing::TestWithParam<const char*> {
 protected:
  // The same prompt packed in a pool that is out of reach, or in one that is not: its extents as a
  // client sees them.
  std::vector<std::vector<std::byte>> Extents(bool gpu) {
    StoreOptions options = SmallPools(2048, 2048);
    options.new_recompressor = NewRecompressor;
    auto device = gpu ? std::make_unique<FakeGpuMemory>(copies_fail_) : NewEmulatedDevice();
    Result<std::unique_ptr<Store>> store =
        Store::Create(options, std::move(device), NewHostMemory());
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    TestSession session(store->get());
    TestSequence s = TestSequence::Prompt(&session, GetParam(), Tokens(150));
    EXPECT_TRUE((*store)->steps().PrefillDone(session.id(), s.id()).ok());
    for (const int32_t first : {150, 170, 200}) {
      EXPECT_TRUE(s.Append(Tokens(40, first * 10)).ok());
      if (gpu && first == 170) {
        *copies_fail_ = true;
        EXPECT_EQ(RecompressAll(store->get(), s.id()).reason(), "COPY_FAILED");
        *copies_fail_ = false;
      }
      const Status status = RecompressAll(store->get(), s.id());
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    std::vector<std::vector<std::byte>> extents;
    const shm::TableView table = s.Table();
    for (uint32_t i = 0; i < table.extents(); ++i) {
      const shm::ExtentEntry& e = *table.extent(i);
      const shm::PageEntry place{e.arena, e.flags, e.tier, e.offset};
      const std::byte* const at = s.At(&place);
      extents.emplace_back(at, at + e.bytes);
      EXPECT_TRUE(VerifyExtent(extents.back()).ok());
    }
    const auto shown = (*store)->inspection().Show(s.id());
    const bool packed = std::string_view(GetParam()).starts_with("mosaickv");
    for (const ExtentInfo& e : shown->extents) {
      EXPECT_EQ(e.kind == ExtentKind::kPackedSegment, packed);
      EXPECT_EQ(e.tier, e.kind == ExtentKind::kLowerPlanes ? Tier::kHost : Tier::kDevice);
    }
    ExpectClean(**store);
    return extents;
  }

  std::shared_ptr<std::atomic<bool>> copies_fail_ = std::make_shared<std::atomic<bool>>(false);
};

INSTANTIATE_TEST_SUITE_P(
    Stored, GpuRecompression,
    ::testing::Values(
        "mosaickv{max_loss = 1, min_tokens = 0, segment = 64, buffer = 16}",
        "mosaickv{max_loss = 1, min_tokens = 0, segment = 64, buffer = 16, keep_raw = \"no\"}",
        "strata{min_tokens = 0, unit = 48}",
        "strata{min_tokens = 0, unit = 48, lower = \"host\", keep_raw = \"no\"}"));

TEST_P(GpuRecompression, GivesTheBytesOfHostMemory) {
  const auto near_bytes = Extents(false);
  EXPECT_GT(near_bytes.size(), 3u);
  EXPECT_EQ(Extents(true), near_bytes);
}

constexpr const char* kLowerOnHost =
    "strata{min_tokens = 0, unit = 48, lower = \"host\", keep_raw = \"no\"}";

class LowerPlanes : public ::testing::Test {
 protected:
  void Make(uint64_t host_pages) {
    StoreOptions options = SmallPools(2048, host_pages);
    options.new_recompressor = NewRecompressor;
    Result<std::unique_ptr<Store>> store = Store::Create(
        options, std::make_unique<FakeGpuMemory>(std::make_shared<std::atomic<bool>>(false)),
        NewHostMemory());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    session_ = std::make_unique<TestSession>(store_.get());
  }
  TestSequence Prompt() {
    TestSequence s = TestSequence::Prompt(session_.get(), kLowerOnHost, Tokens(200));
    EXPECT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
    return s;
  }
  // What sequences hold of a tier.
  uint64_t Used(Tier tier) const {
    uint64_t used = 0;
    for (const PoolInfo& pool : store_->inspection().Pools()) {
      if (pool.tier == tier) used += pool.used_bytes;
    }
    return used;
  }

  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

// The host's pool has what lower runs take, the GPU's what is left: upper runs and rows of the
// group that fills. A fork takes none for itself.
TEST_F(LowerPlanes, AreTheHostPoolsAndShared) {
  Make(512);
  const TestSequence s = Prompt();
  const uint64_t raw = Used(Tier::kDevice);
  EXPECT_EQ(Used(Tier::kHost), 0u);
  ASSERT_TRUE(RecompressAll(store_.get(), s.id()).ok());
  uint64_t of_tier[2] = {};
  for (const ExtentInfo& e : store_->inspection().Show(s.id())->extents) {
    of_tier[e.tier == Tier::kHost ? 1 : 0] += (e.bytes + 4095) / 4096 * 4096;
  }
  EXPECT_GT(of_tier[1], of_tier[0]);
  EXPECT_EQ(Used(Tier::kHost), of_tier[1]);
  EXPECT_LT(Used(Tier::kDevice), raw);
  const Result<TestSequence> child = s.Fork();
  ASSERT_TRUE(child.ok()) << child.status().ToString();
  EXPECT_EQ(store_->inspection().Show(child->id())->extents.size(), 8u);
  EXPECT_EQ(Used(Tier::kHost), of_tier[1]);
  ExpectClean(*store_);
}

// Rows stay raw, and nothing is lost.
TEST_F(LowerPlanes, AHostPoolThatIsFullLeavesRowsRaw) {
  Make(1);
  const TestSequence s = Prompt();
  const uint64_t raw = Used(Tier::kDevice);
  EXPECT_EQ(RecompressAll(store_.get(), s.id()).reason(), "POOL_EXHAUSTED");
  EXPECT_TRUE(store_->inspection().Show(s.id())->extents.empty());
  EXPECT_EQ(Used(Tier::kDevice), raw);
  EXPECT_EQ(Used(Tier::kHost), 0u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

// A GPU's client measures like any other, but for what its graphs run.
TEST(FakeGpuMemory, RecallIsAuditedUntilAStepWasCaptured) {
  Result<std::unique_ptr<Store>> store = Store::Create(
      SmallPools(64, 64),
      std::make_unique<FakeGpuMemory>(std::make_shared<std::atomic<bool>>(false)), NewHostMemory());
  ASSERT_TRUE(store.ok());
  TestSession session(store->get());
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(20));
  const Result<RecallStart> start =
      (*store)->recalls().StartRecallAudit(s.id(), {.every = 1, .steps = 4}, {});
  ASSERT_TRUE(start.ok()) << start.status().ToString();
  RecallSamples sample;
  sample.audit = start->audit->number();
  sample.position = 20;
  sample.captured = true;
  (*store)->recalls().AddRecall(session.id(), s.id(), sample);
  Status why;
  ASSERT_TRUE(start->audit->Ended(&why));
  EXPECT_EQ(why.code(), Code::kFailedPrecondition);
  EXPECT_EQ(why.reason(), "RECALL_CAPTURED");
  EXPECT_NE(why.message().find("position 20"), std::string::npos) << why.message();
  EXPECT_EQ(session.reader().Recall(s.opened().slot).audit, 0u) << "still asked for";
}

TEST(FakeGpuMemory, PlansThatItDoesNotServeAreRefused) {
  StoreOptions options = SmallPools(64, 64);
  options.serves = [](const Plan& plan, const Geometry&) {
    return plan.selector == SelectorKind::kFull
               ? OkStatus()
               : Unimplemented("PLAN_DEVICE", "selector is not full");
  };
  const std::unique_ptr<Store> store = NewStore(options);
  TestSession session(store.get());
  EXPECT_TRUE(session.Open("full", Tokens(20)).ok());
  EXPECT_EQ(session.Open("quest", Tokens(20)).status().reason(), "PLAN_DEVICE");
  ExpectClean(*store);
}

}  // namespace
}  // namespace kvstrata::testing
