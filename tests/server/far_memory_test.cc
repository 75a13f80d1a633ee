// A store whose device pool the daemon cannot touch (a GPU's): every way that its bytes take.
#include <gtest/gtest.h>

#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

class FarMemoryTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Store>> store = Store::Create(
        SmallPools(512, 512), std::make_unique<FarMemory>(copies_fail_), NewHostPinned());
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    session_ = std::make_unique<TestSession>(store_.get());
  }

  std::shared_ptr<std::atomic<bool>> copies_fail_ = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

INSTANTIATE_TEST_SUITE_P(Plans, FarMemoryTest, ::testing::Values("full", "quest"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(FarMemoryTest, AForkWritesACopyOfTheTail) {
  TestSequence parent = TestSequence::Prompt(session_.get(), GetParam(), Tokens(39));
  Result<TestSequence> child = parent.Fork();
  ASSERT_TRUE(child.ok()) << child.status().ToString();
  ASSERT_TRUE(child->Append(Tokens(30, 1000)).ok());
  ASSERT_TRUE(parent.Append(Tokens(30, 2000)).ok());
  parent.ExpectIntact();
  child->ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(FarMemoryTest, PagesMoveToTheHostAndBack) {
  TestSequence s = TestSequence::Prompt(session_.get(), GetParam(), Tokens(100));
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
    const Result<MoveResult> moved = store_->Move(s.id(), tier);
    ASSERT_TRUE(moved.ok()) << moved.status().ToString();
    EXPECT_EQ(moved->pages, 6u);
    s.ExpectIntact();
  }
  ASSERT_TRUE(s.Append(Tokens(20, 100)).ok());
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_P(FarMemoryTest, AFailedCopyChangesNothing) {
  TestSequence parent = TestSequence::Prompt(session_.get(), GetParam(), Tokens(39));
  Result<TestSequence> child = parent.Fork();
  ASSERT_TRUE(child.ok()) << child.status().ToString();
  const uint64_t used = UsedBytes(*store_);
  *copies_fail_ = true;
  EXPECT_EQ(child->Append(Tokens(1, 1000)).reason(), "COPY_FAILED");
  EXPECT_EQ(store_->Move(parent.id(), Tier::kHost).status().reason(), "COPY_FAILED");
  store_->Reclaim();
  EXPECT_EQ(UsedBytes(*store_), used);
  *copies_fail_ = false;
  ASSERT_TRUE(child->Append(Tokens(1, 1000)).ok());
  parent.ExpectIntact();
  child->ExpectIntact();
  ExpectClean(*store_);
}

TEST(FarMemory, NoAuditOfRecall) {
  Result<std::unique_ptr<Store>> store = Store::Create(
      SmallPools(64, 64), std::make_unique<FarMemory>(std::make_shared<std::atomic<bool>>(false)),
      NewHostPinned());
  ASSERT_TRUE(store.ok());
  TestSession session(store->get());
  TestSequence s = TestSequence::Prompt(&session, "full", Tokens(20));
  EXPECT_EQ((*store)->StartRecallAudit(s.id(), {}, {}).status().reason(), "RECALL_DEVICE");
}

TEST(FarMemory, PlansThatItDoesNotServeAreRefused) {
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
