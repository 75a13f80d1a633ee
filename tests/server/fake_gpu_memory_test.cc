// SPDX-License-Identifier: Apache-2.0
// A store whose device pool the daemon cannot touch (a GPU's): every way that its bytes take.
#include <gtest/gtest.h>

#include "kernels/codec/codec.h"
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

// What a worker does, in this thread, until nothing is due.
Status Recompress(Store* store, uint64_t sequence) {
  for (;;) {
    Result<RecompressJob> job = store->recompression().TakeRecompression(sequence);
    if (!job.ok()) return job.status().reason() == "WORK_NOTHING" ? OkStatus() : job.status();
    job->input.backend = *FindBackend("ref");
    job->input.executor = &InlineExecutor();
    std::unique_ptr<Recompressor> next;
    RecompressOutput output;
    if (job->recompressor != nullptr) {
      next = job->recompressor->Clone();
      Status status = store->recompression().StageRecompression(&*job);
      if (status.ok()) {
        Result<RecompressOutput> ran = next->Run(job->input);
        status = ran.status();
        if (ran.ok()) output = std::move(*ran);
      }
      if (!status.ok()) {
        store->recompression().AbandonRecompression(std::move(*job), status);
        return status;
      }
    }
    KVS_RETURN_IF_ERROR(
        store->recompression()
            .PublishRecompression(std::move(*job), std::move(next), std::move(output))
            .status());
  }
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
        EXPECT_EQ(Recompress(store->get(), s.id()).reason(), "COPY_FAILED");
        *copies_fail_ = false;
      }
      const Status status = Recompress(store->get(), s.id());
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
    for (const ExtentInfo& e : shown->extents) {
      EXPECT_EQ(e.kind, ExtentKind::kPackedSegment);
    }
    ExpectClean(**store);
    return extents;
  }

  std::shared_ptr<std::atomic<bool>> copies_fail_ = std::make_shared<std::atomic<bool>>(false);
};

INSTANTIATE_TEST_SUITE_P(
    Packed, GpuRecompression,
    ::testing::Values(
        "mosaickv{max_loss = 1, min_tokens = 0, segment = 64, buffer = 16}",
        "mosaickv{max_loss = 1, min_tokens = 0, segment = 64, buffer = 16, keep_raw = \"no\"}"));

TEST_P(GpuRecompression, GivesTheBytesOfHostMemory) {
  const auto near_bytes = Extents(false);
  EXPECT_GT(near_bytes.size(), 3u);
  EXPECT_EQ(Extents(true), near_bytes);
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
