// SPDX-License-Identifier: Apache-2.0
// The queue and its workers: settle waits, order, bounds, cancelling, failures; decode goes on.
#include "server/work/recompress.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "tests/fakes/copying_codec.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {
namespace {

using testing::CodecControl;
using testing::CopyingCodec;
using testing::ExpectClean;
using testing::NewStore;
using testing::SmallPools;
using testing::TestSequence;
using testing::TestSession;
using testing::Tokens;
using testing::UsedBytes;

using namespace std::chrono_literals;

// For effects of another thread that announces nothing.
template <typename F>
bool Eventually(F done) {
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

class RecompressTest : public ::testing::Test {
 protected:
  ~RecompressTest() override { control_->Hold(false); }

  void Start(WorkOptions work = {}, uint64_t device_pages = 512, uint64_t host_pages = 512) {
    StoreOptions options = SmallPools(device_pages, host_pages);
    options.recompress_retry = 50ms;
    options.new_recompressor = [this](const Plan&, const Geometry& geometry, ParametersPtr) {
      return std::make_unique<CopyingCodec>(control_, geometry);
    };
    store_ = NewStore(options);
    session_ = std::make_unique<TestSession>(store_.get());
    queue_ = std::make_unique<RecompressQueue>(work, store_.get(), &Backends().front());
  }
  TestSequence Prompt(int32_t n, int first = 0) {
    return TestSequence::Prompt(session_.get(), "window", Tokens(n, first));
  }
  std::future<Status> Settled(const TestSequence& s) {
    auto done = std::make_shared<std::promise<Status>>();
    store_->recompression().Settle(session_->id(), s.id(),
                                   [done](const Status& status) { done->set_value(status); });
    return done->get_future();
  }
  // The status; DEADLINE_EXCEEDED after 20 s.
  Status Settle(const TestSequence& s) {
    std::future<Status> settled = Settled(s);
    if (settled.wait_for(20s) == std::future_status::ready) return settled.get();
    return Status(Code::kDeadlineExceeded, "TEST", "not settled");
  }
  std::string StateOf(const TestSequence& s) {
    for (const WorkInfo& info : store_->requests().Work()) {
      if (info.sequence == s.id()) return info.state;
    }
    return "";
  }

  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
  std::unique_ptr<RecompressQueue> queue_;
};

TEST_F(RecompressTest, SettleAnswersWhenNothingIsLeftToDo) {
  Start();
  control_->Hold(true);
  TestSequence s = Prompt(100);
  ASSERT_TRUE(Eventually([&] { return StateOf(s) == "running"; }));
  std::future<Status> settled = Settled(s);
  EXPECT_EQ(settled.wait_for(50ms), std::future_status::timeout);
  ASSERT_TRUE(s.Append(Tokens(64, 500)).ok());  // due again when the run ends
  control_->Hold(false);
  ASSERT_EQ(settled.wait_for(20s), std::future_status::ready);
  EXPECT_TRUE(settled.get().ok());
  EXPECT_EQ(s.Table().extents(), 5u);
  EXPECT_TRUE(store_->requests().Work().empty());
  EXPECT_TRUE(Settle(s).ok()) << "at once";
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(RecompressTest, SettleOfNobodyIsAnError) {
  Start();
  TestSequence s = Prompt(10);
  ASSERT_TRUE(s.Close().ok());
  EXPECT_EQ(Settle(s).reason(), "SEQUENCE_UNKNOWN");
}

TEST_F(RecompressTest, DecodeGoesOnWhileWorkersAreBusy) {
  Start();
  control_->Hold(true);
  TestSequence s = Prompt(100);
  ASSERT_TRUE(Eventually([&] { return StateOf(s) == "running"; }));
  for (int i = 0; i < 300; ++i) ASSERT_TRUE(s.Append(i).ok());
  EXPECT_EQ(StateOf(s), "running");
  s.ExpectIntact();
  ExpectClean(*store_);
  control_->Hold(false);
  ASSERT_TRUE(Settle(s).ok());
  EXPECT_EQ(s.Table().extents(), 12u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(RecompressTest, ACloseCancelsWhatRuns) {
  Start();
  control_->Hold(true);
  TestSequence s = Prompt(100);
  ASSERT_TRUE(Eventually([&] { return StateOf(s) == "running"; }));
  std::future<Status> settled = Settled(s);
  ASSERT_TRUE(s.Close().ok());
  ASSERT_EQ(settled.wait_for(20s), std::future_status::ready);
  EXPECT_EQ(settled.get().reason(), "SEQUENCE_CLOSED");
  ExpectClean(*store_);
  // Held still: the worker came back because of the close.
  (void)store_->eviction().Evict(false);
  EXPECT_TRUE(Eventually([&] {
    store_->references().Reclaim();
    return UsedBytes(*store_) == 0;
  }));
  ExpectClean(*store_);
}

TEST_F(RecompressTest, AFullQueueLosesNothing) {
  Start({1, 2, 1, {}});
  control_->Hold(true);
  std::vector<TestSequence> sequences;
  sequences.push_back(Prompt(64));
  ASSERT_TRUE(Eventually([&] { return control_->runs == 1; }));
  for (int i = 1; i < 8; ++i) sequences.push_back(Prompt(64, 1000 * i));
  EXPECT_EQ(queue_->waiting(), 2u);
  int due = 0;
  for (const TestSequence& s : sequences) due += StateOf(s) == "due";
  EXPECT_EQ(due, 5);
  control_->Hold(false);
  for (const TestSequence& s : sequences) {
    EXPECT_TRUE(Settle(s).ok());
    EXPECT_EQ(s.Table().extents(), 2u);
    s.ExpectIntact();
  }
  ExpectClean(*store_);
}

TEST_F(RecompressTest, ClosedOnesLeaveTheQueue) {
  Start({1, 2, 1, {}});
  control_->Hold(true);
  TestSequence running = Prompt(64);
  ASSERT_TRUE(Eventually([&] { return control_->runs == 1; }));
  TestSequence a = Prompt(64, 1000), b = Prompt(64, 2000);
  EXPECT_EQ(queue_->waiting(), 2u);
  ASSERT_TRUE(a.Close().ok());
  EXPECT_EQ(queue_->waiting(), 1u);
  TestSequence c = Prompt(64, 3000);
  EXPECT_EQ(StateOf(c), "queued");
  control_->Hold(false);
  EXPECT_TRUE(Settle(b).ok());
  EXPECT_TRUE(Settle(c).ok());
  ExpectClean(*store_);
}

// Runs end in this order: the sequences' extents counts tell.
TEST_F(RecompressTest, UnderPressureTheLargestGoFirst) {
  Start({1, 16, 1, {}}, 128, 512);
  control_->Hold(true);
  TestSequence running = Prompt(64);
  ASSERT_TRUE(Eventually([&] { return control_->runs == 1; }));
  TestSequence small = Prompt(64, 1000);
  TestSequence large = Prompt(800, 2000);
  TestSequence last = Prompt(700, 5000);
  ASSERT_TRUE(store_->moves().UnderPressure());
  std::vector<uint64_t> order;
  std::mutex mu;
  for (const TestSequence* s : {&small, &large, &last}) {
    store_->recompression().Settle(session_->id(), s->id(), [&, id = s->id()](const Status&) {
      std::lock_guard lock(mu);
      order.push_back(id);
    });
  }
  control_->tier = Tier::kHost;
  control_->Hold(false);
  ASSERT_TRUE(Eventually([&] {
    std::lock_guard lock(mu);
    return order.size() == 3;
  }));
  EXPECT_EQ(order.front(), large.id());
  ExpectClean(*store_);
}

TEST_F(RecompressTest, WithoutPressureTheFirstGoesFirst) {
  Start({1, 16, 1, {}}, 4096, 512);
  control_->Hold(true);
  TestSequence running = Prompt(64);
  ASSERT_TRUE(Eventually([&] { return control_->runs == 1; }));
  TestSequence small = Prompt(64, 1000);
  TestSequence large = Prompt(800, 2000);
  ASSERT_FALSE(store_->moves().UnderPressure());
  std::future<Status> first = Settled(small);
  bool small_was_done = false;
  auto last = std::make_shared<std::promise<void>>();
  store_->recompression().Settle(session_->id(), large.id(), [&, last](const Status&) {
    small_was_done = first.wait_for(0s) == std::future_status::ready;
    last->set_value();
  });
  control_->Hold(false);
  ASSERT_EQ(last->get_future().wait_for(20s), std::future_status::ready);
  EXPECT_TRUE(small_was_done);
}

TEST_F(RecompressTest, AFailureIsToldShownAndTriedAgain) {
  Start();
  control_->Fail(Status(Code::kDataLoss, "KEYS_NOT_FINITE", "a key of layer 0 is NaN"));
  TestSequence s = Prompt(64);
  EXPECT_EQ(Settle(s).reason(), "KEYS_NOT_FINITE");
  EXPECT_EQ(s.Table().extents(), 0u);
  ASSERT_EQ(store_->requests().Work().size(), 1u);
  EXPECT_NE(store_->requests().Work()[0].error.find("KEYS_NOT_FINITE"), std::string::npos);
  EXPECT_GE(store_->requests().Work()[0].failures, 1u);
  const int runs = control_->runs;
  EXPECT_LE(runs, 3) << "it is not tried again at once";
  control_->Fail(OkStatus());
  const auto has_extents = [&] {  // a worker may replace the table meanwhile
    const int reader = session_->reader().Enter();
    const bool all = s.Table().extents() == 2;
    session_->reader().Leave(reader);
    return all;
  };
  EXPECT_TRUE(Eventually(has_extents)) << "nobody has to ask";
  // The table is published before the work is taken off the list.
  EXPECT_TRUE(Eventually([&] { return store_->requests().Work().empty(); }));
  ExpectClean(*store_);
}

TEST_F(RecompressTest, AStopCancelsAndAnswers) {
  Start();
  control_->Hold(true);
  TestSequence s = Prompt(64), other = Prompt(64, 1000);
  ASSERT_TRUE(Eventually([&] { return StateOf(s) == "running"; }));
  std::future<Status> settled = Settled(s), waiting = Settled(other);
  queue_->Stop();
  EXPECT_EQ(settled.get().reason(), "WORK_STOPPED");
  EXPECT_EQ(waiting.get().reason(), "WORK_STOPPED");
  EXPECT_TRUE(Settle(s).ok()) << "nobody works: nothing is waited for";
  ExpectClean(*store_);
  // Another queue takes over.
  control_->Hold(false);
  queue_ = std::make_unique<RecompressQueue>(WorkOptions{2, 8, 2, {0}}, store_.get(),
                                             &Backends().front());
  EXPECT_TRUE(Settle(s).ok());
  EXPECT_TRUE(Settle(other).ok());
  EXPECT_EQ(other.Table().extents(), 2u);
  ExpectClean(*store_);
}

// Steps, recompressions, forks and closes from several threads at once.
TEST_F(RecompressTest, ManyAtOnce) {
  Start({2, 4, 1, {}}, 2048, 512);
  control_->unit = 16;
  control_->merge = true;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      TestSession session(store_.get(), "uid:" + std::to_string(t % 2));
      for (int round = 0; round < 4; ++round) {
        TestSequence s = TestSequence::Prompt(&session, "window", Tokens(90, 1000 * round));
        (void)store_->steps().PrefillDone(session.id(), s.id());
        for (int i = 0; i < 60; ++i) wrong += !s.Append(i).ok();
        const int reader = session.reader().Enter();
        const shm::TableView table = s.Table();
        for (int i = 0; i < 5; ++i) s.ExpectIntact(table);
        session.reader().Leave(reader);
        Result<TestSequence> child = s.Fork();
        wrong += !child.ok();
        if (child.ok()) wrong += !child->Append(Tokens(40)).ok();
        wrong += !s.Close().ok();
        if (child.ok() && round % 2 == 0) wrong += !child->Close().ok();
      }
      store_->sessions().EndSession(session.id(), SessionEnd::kDied);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  queue_->Stop();
  (void)store_->eviction().Evict(false);
  store_->references().Reclaim();
  ExpectClean(*store_);
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

}  // namespace
}  // namespace kvstrata
