// SPDX-License-Identifier: Apache-2.0
// WorkQueue and Strand: order, the limit of what may wait, the last task.
#include <gtest/gtest.h>

#include <future>
#include <new>

#include "server/rpc/steps/work_queue.h"

namespace kvstrata {
namespace {

// Two threads, one of which waits in the strand's first task until Release.
class StrandTest : public ::testing::Test {
 protected:
  StrandTest() {
    EXPECT_EQ(Post([wait = gate_.get_future().share()] { wait.wait(); }), Strand::Outcome::kQueued);
  }
  ~StrandTest() override { Release(); }
  void Release() {
    if (!released_) gate_.set_value();
    released_ = true;
  }
  Strand::Outcome Post(WorkQueue::Task task) { return strand_->Post(std::move(task)); }

  std::promise<void> gate_;
  bool released_ = false;
  WorkQueue queue_{2};
  std::shared_ptr<Strand> strand_ = std::make_shared<Strand>(&queue_);
};

TEST_F(StrandTest, RunsInOrderUpToTheLastTask) {
  std::vector<int> ran;
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(Post([&ran, i] { ran.push_back(i); }), Strand::Outcome::kQueued);
  }
  std::promise<void> ended;
  strand_->PostLast([&] { ended.set_value(); });
  EXPECT_EQ(Post([&ran] { ran.push_back(-1); }), Strand::Outcome::kClosed);
  Release();
  ended.get_future().wait();
  ASSERT_EQ(ran.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(ran[static_cast<size_t>(i)], i);
}

TEST_F(StrandTest, RefusesMoreThanMayWaitButNeverTheLastTask) {
  // The running task counts.
  for (size_t i = 1; i < Strand::kMaxWaiting; ++i) {
    ASSERT_EQ(Post([] {}), Strand::Outcome::kQueued) << i;
  }
  EXPECT_EQ(Post([] {}), Strand::Outcome::kFull);
  std::promise<void> ended;
  strand_->PostLast([&] { ended.set_value(); });
  Release();
  ended.get_future().wait();
}

TEST_F(StrandTest, HoldsUpNobodyElse) {
  const auto other = std::make_shared<Strand>(&queue_);
  std::promise<void> ran;
  ASSERT_EQ(other->Post([&] { ran.set_value(); }), Strand::Outcome::kQueued);
  ran.get_future().wait();  // the other thread's
}

TEST(WorkQueueTest, WhatATaskThrowsEndsThatTaskAlone) {
  WorkQueue queue(1);
  const auto strand = std::make_shared<Strand>(&queue);
  std::promise<void> next;
  ASSERT_EQ(strand->Post([] { throw std::bad_alloc(); }), Strand::Outcome::kQueued);
  ASSERT_EQ(strand->Post([&] { next.set_value(); }), Strand::Outcome::kQueued);
  EXPECT_EQ(next.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
}

}  // namespace
}  // namespace kvstrata
