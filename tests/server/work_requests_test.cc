// SPDX-License-Identifier: Apache-2.0
// Recompression on request: asked for, followed, cancelled wherever it is.
#include "server/store/codecs/work_requests.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "server/work/recompress.h"
#include "tests/fakes/copying_codec.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using namespace std::chrono_literals;

class WorkRequestsTest : public ::testing::Test {
 protected:
  ~WorkRequestsTest() override { control_->Hold(false); }

  void Start(WorkOptions work = {}, std::chrono::microseconds retry = 1h) {
    StoreOptions options = SmallPools(512, 512);
    options.recompress_retry = retry;
    options.new_recompressor = [this](const Plan& plan, const Geometry& geometry,
                                      ParametersPtr) -> std::unique_ptr<Recompressor> {
      if (plan.selector == SelectorKind::kFull) return nullptr;
      return std::make_unique<CopyingCodec>(control_, geometry);
    };
    store_ = NewStore(options);
    session_ = std::make_unique<TestSession>(store_.get());
    queue_ = std::make_unique<RecompressQueue>(work, store_.get(), &Backends().front());
  }
  TestSequence Prompt(int32_t n, int first = 0) {
    return TestSequence::Prompt(session_.get(), "window", Tokens(n, first));
  }
  // Asked for, or settled if !ask.
  std::future<Status> Awaited(const TestSequence& s, bool ask) {
    auto done = std::make_shared<std::promise<Status>>();
    std::future<Status> answer = done->get_future();
    const auto tell = [done](const Status& status) { done->set_value(status); };
    if (!ask) {
      store_->recompression().Settle(session_->id(), s.id(), tell);
      return answer;
    }
    const Status asked = store_->requests().Recompress(session_->id(), s.id(), tell);
    if (!asked.ok()) tell(asked);
    return answer;
  }
  static Status Get(std::future<Status> answer) {
    if (answer.wait_for(20s) == std::future_status::ready) return answer.get();
    return Status(Code::kDeadlineExceeded, "TEST", "no answer");
  }
  std::string StateOf(const TestSequence& s) {
    for (const WorkInfo& info : store_->requests().Work()) {
      if (info.sequence == s.id()) return info.state;
    }
    return "";
  }
  void AwaitState(const TestSequence& s, const std::string& state) {
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (StateOf(s) != state) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << StateOf(s) << " for " << state;
      std::this_thread::yield();
    }
  }

  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
  std::unique_ptr<RecompressQueue> queue_;
};

TEST_F(WorkRequestsTest, RawAndUnknownOnesAreRefused) {
  Start();
  TestSequence full = TestSequence::Prompt(session_.get(), "full", Tokens(40));
  EXPECT_EQ(Get(Awaited(full, true)).reason(), "RECOMPRESS_RAW");
  EXPECT_EQ(store_->requests().Progress(0, full.id()).status().reason(), "RECOMPRESS_RAW");
  EXPECT_EQ(store_->requests().Recompress(0, 4711, nullptr).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store_->requests().Cancel(0, 4711).status().reason(), "SEQUENCE_UNKNOWN");
  const Result<bool> none = store_->requests().Cancel(0, full.id());
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(*none);
  TestSession other(store_.get(), "uid:2");
  EXPECT_EQ(store_->requests().Cancel(other.id(), full.id()).status().reason(), "SEQUENCE_UNKNOWN");
}

TEST_F(WorkRequestsTest, AskingDoesNotWaitOutAFailure) {
  Start();
  control_->Fail(Internal("TEST", "as told"));
  TestSequence s = Prompt(100);
  EXPECT_EQ(Get(Awaited(s, false)).reason(), "TEST");
  control_->Fail(OkStatus());
  EXPECT_EQ(Get(Awaited(s, false)).reason(), "TEST") << "an hour is to be waited out";
  EXPECT_TRUE(Get(Awaited(s, true)).ok());
  EXPECT_EQ(s.Table().extents(), 3u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(WorkRequestsTest, ACancelledRunLeavesNothing) {
  Start();
  control_->Hold(true);
  TestSequence s = Prompt(100);
  AwaitState(s, "running");
  std::future<Status> settled = Awaited(s, false);
  const Result<bool> ran = store_->requests().Cancel(0, s.id());
  ASSERT_TRUE(ran.ok());
  EXPECT_TRUE(*ran);
  EXPECT_EQ(Get(std::move(settled)).reason(), "WORK_CANCELLED");
  AwaitState(s, "cancelled");
  EXPECT_TRUE(store_->requests().Progress(0, s.id())->done);
  EXPECT_EQ(Get(Awaited(s, false)).reason(), "WORK_CANCELLED");
  EXPECT_EQ(s.Table().extents(), 0u);
  s.ExpectIntact();
  ExpectClean(*store_);
  control_->Hold(false);
  const int runs = control_->runs;
  // Nobody offers it: another sequence's run comes and goes.
  TestSequence other = Prompt(100, 5000);
  EXPECT_TRUE(Get(Awaited(other, false)).ok());
  EXPECT_EQ(StateOf(s), "cancelled");
  EXPECT_EQ(control_->runs, runs + 1);
  EXPECT_TRUE(Get(Awaited(s, true)).ok());
  EXPECT_EQ(s.Table().extents(), 3u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(WorkRequestsTest, WhatIsQueuedIsWithdrawnAndACommitOffersIt) {
  Start();
  control_->Hold(true);
  TestSequence first = Prompt(100);
  AwaitState(first, "running");
  TestSequence s = Prompt(100, 5000);
  EXPECT_EQ(StateOf(s), "queued");
  const Result<bool> ran = store_->requests().Cancel(session_->id(), s.id());
  ASSERT_TRUE(ran.ok());
  EXPECT_FALSE(*ran);
  EXPECT_EQ(StateOf(s), "cancelled");
  EXPECT_EQ(queue_->waiting(), 0u);
  control_->Hold(false);
  EXPECT_TRUE(Get(Awaited(first, false)).ok());
  EXPECT_EQ(StateOf(s), "cancelled");
  ASSERT_TRUE(s.Append(7).ok());
  EXPECT_TRUE(Get(Awaited(s, false)).ok());
  EXPECT_EQ(s.Table().extents(), 3u);
  ExpectClean(*store_);
}

// The run has ended and its extents are being published: the flag is looked at once more.
TEST_F(WorkRequestsTest, ACancelBeforeThePublicationIsInTime) {
  Start({.threads = 0});
  TestSequence s = Prompt(100);
  RecompressSink* const none = queue_.get();
  store_->requests().SetSink(none);  // a queue that nobody serves
  Result<RecompressJob> job = store_->recompression().TakeRecompression(s.id());
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  Result<RecompressOutput> output = next->Run(job->input);
  ASSERT_TRUE(output.ok());
  ASSERT_TRUE(*store_->requests().Cancel(0, s.id()));
  const Result<RecompressResult> published = store_->recompression().PublishRecompression(
      std::move(*job), std::move(next), std::move(*output));
  EXPECT_EQ(published.status().reason(), "CANCELLED");
  EXPECT_EQ(s.Table().extents(), 0u);
  EXPECT_EQ(StateOf(s), "cancelled");
  EXPECT_EQ(store_->inspection().Counters().recompress_failures, 0u);
  s.ExpectIntact();
  ExpectClean(*store_);
  EXPECT_EQ(store_->recompression().TakeRecompression(s.id()).status().reason(), "WORK_CANCELLED");
  store_->requests().SetSink(nullptr);
}

}  // namespace
}  // namespace kvstrata::testing
