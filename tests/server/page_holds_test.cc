// SPDX-License-Identifier: Apache-2.0
// What a hold does to a page that everybody else has done with.
#include <gtest/gtest.h>

#include "server/store/references/page_references.h"
#include "server/store/store_parts.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {

struct AuditTestPeer {
  using Parts = Store::Parts;
  static Parts& Of(Store& store) { return *store.parts_; }
};

namespace {

using testing::ExpectClean;
using testing::NewStore;
using testing::SmallPools;
using testing::TestSequence;
using testing::TestSession;
using testing::Tokens;
using testing::UsedBytes;

constexpr uint64_t kPage = 4096;

// A prompt of four whole pages, of which a test holds the first.
class PageHoldsTest : public ::testing::Test {
 protected:
  PageHoldsTest() {
    StoreLock lock(parts_.books.mu);
    page_ = parts_.catalog.SequenceOf(s_.id())->pages.front();
    hold_ = parts_.holds.Begin();
  }
  void Keep() {
    StoreLock lock(parts_.books.mu);
    parts_.holds.Keep(hold_, page_);
  }
  void Refer() {
    StoreLock lock(parts_.books.mu);
    parts_.holds.Refer(hold_, page_);
  }
  void End() {
    StoreLock lock(parts_.books.mu);
    parts_.holds.End(hold_);
  }
  // Whether the page is among those that wait for a hold.
  bool Parked() {
    StoreLock lock(parts_.books.mu);
    return parts_.references.parked().contains(page_);
  }
  void CloseAndEvict() {
    ASSERT_TRUE(s_.Close().ok());
    (void)store_->eviction().Evict(false);
    store_->references().Reclaim();
    ExpectClean(*store_);
  }

  const std::unique_ptr<Store> store_ = NewStore(SmallPools(64, 64));
  AuditTestPeer::Parts& parts_ = AuditTestPeer::Of(*store_);
  TestSession session_{store_.get()};
  TestSequence s_ = TestSequence::Prompt(&session_, "full", Tokens(64));
  Page* page_ = nullptr;
  uint64_t hold_ = 0;
};

TEST_F(PageHoldsTest, WithoutOneAPageIsFree) {
  CloseAndEvict();
  EXPECT_FALSE(Parked());
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

TEST_F(PageHoldsTest, WhatIsKeptIsEvictedAndFreedAtTheEndOfTheHold) {
  Keep();
  CloseAndEvict();
  EXPECT_TRUE(Parked());
  EXPECT_EQ(UsedBytes(*store_), kPage);
  End();
  EXPECT_FALSE(Parked());
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectClean(*store_);
}

TEST_F(PageHoldsTest, TheLastOfSeveralFreesIt) {
  Keep();
  Keep();
  CloseAndEvict();
  {
    StoreLock lock(parts_.books.mu);
    parts_.holds.End(parts_.holds.Keep(page_));
  }
  EXPECT_TRUE(Parked());
  End();
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectClean(*store_);
}

TEST_F(PageHoldsTest, WhatIsReferredToIsNotEvicted) {
  Refer();
  CloseAndEvict();
  EXPECT_EQ(UsedBytes(*store_), kPage);
  End();
  ExpectClean(*store_);
  EXPECT_EQ(store_->eviction().Evict(false).pages(), 1u) << "it is cached then";
}

TEST_F(PageHoldsTest, ReferencesComeAndGo) {
  {
    StoreLock lock(parts_.books.mu);
    parts_.references.RefPage(page_);
    parts_.holds.TakeOver(hold_, page_);
  }
  ExpectClean(*store_);
  {
    StoreLock lock(parts_.books.mu);
    parts_.holds.HandOver(hold_, page_);
    parts_.references.Release(page_);
  }
  ExpectClean(*store_);
  End();
  CloseAndEvict();
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

}  // namespace
}  // namespace kvstrata
