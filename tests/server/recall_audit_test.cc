// SPDX-License-Identifier: Apache-2.0
// Recall audits: the numbers of a report, what is refused as a sample, and what the store asks of
// whoever runs the sequence's steps.
#include "server/store/reports/recall_audit.h"

#include <gmock/gmock.h>

#include <limits>
#include <numeric>

#include "server/store/reports/session_totals.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {
namespace {

using ::testing::ElementsAre;
using testing::ExpectClean;
using ::testing::HasSubstr;
using testing::NewStore;
using testing::SmallPools;
using testing::TestSequence;
using testing::TestSession;
using testing::Tokens;

using Floats = std::vector<float>;

// Samples of one step that live as long as this.
struct StepSamples {
  std::vector<int32_t> layers;
  Floats recall, error;
  RecallSamples Of(uint32_t audit, int32_t position, int32_t heads, uint32_t dropped = 0) const {
    return {audit, position, heads, false, dropped, layers, recall, error};
  }
};

TEST(RecallReport, IsTheDistributionByLayer) {
  RecallAudit audit(7, {.every = 2, .steps = 3}, 4, 2, nullptr);
  const StepSamples a{{0, 3}, {0.1f, 0.9f, 1.0f, 1.0f}, {2, 4, 0, 0}};
  const StepSamples b{{3}, {0.5f, 0.0f}, {1e-7f, 1000}};
  EXPECT_TRUE(audit.Add(a.Of(7, 10, 2)).ok());
  EXPECT_TRUE(audit.Add(b.Of(7, 12, 2, 5)).ok());
  const RecallReport r = audit.Report();
  EXPECT_EQ(r.progress.steps, 2u);
  EXPECT_EQ(r.progress.wanted, 3u);
  EXPECT_EQ(r.progress.dropped, 5u);
  EXPECT_EQ(r.progress.first_position, 10);
  EXPECT_EQ(r.progress.last_position, 12);
  ASSERT_EQ(r.layers.size(), 2u);
  EXPECT_EQ(r.layers[0].layer, 0);
  EXPECT_EQ(r.layers[1].layer, 3);
  EXPECT_EQ(r.layers[0].recall.samples, 2u);
  EXPECT_NEAR(r.layers[0].recall.mean, 0.5, 1e-6);
  EXPECT_NEAR(r.layers[0].recall.p5, 0.1 + 0.05 * 0.8, 1e-6);
  EXPECT_NEAR(r.layers[0].error.p95, 2 + 0.95 * 2, 1e-6);
  EXPECT_EQ(r.layers[1].recall.samples, 4u);
  EXPECT_NEAR(r.layers[1].recall.p50, 0.75, 1e-6);
  EXPECT_EQ(r.all.layer, -1);
  EXPECT_EQ(r.all.recall.samples, 6u);
  EXPECT_EQ(r.all.recall.min, 0);
  EXPECT_EQ(r.all.recall.max, 1);
  EXPECT_EQ(r.all.error.max, 1000);
}

TEST(RecallReport, BinsAreWhatTheirBoundsSay) {
  const std::vector<double> recall = RecallBounds(), error = ErrorBounds();
  ASSERT_EQ(recall.size(), kRecallBins + 1u);
  ASSERT_EQ(error.size(), kErrorBins + 1u);
  EXPECT_EQ(recall.back(), 1.0);
  EXPECT_EQ(error[1], 0x1p-20);
  EXPECT_EQ(error[kErrorBins - 1], 16);
  const float most = std::numeric_limits<float>::max();
  const Floats recalls = {0, 0.05f, 0.049f, 0.5f, 0.999f, 1};
  const Floats errors = {0, 0x1p-21f, 0x1p-20f, 1, 16, most};
  RecallAudit audit(1, {.every = 1, .steps = 1}, 1, 6, nullptr);
  const StepSamples s{{0}, recalls, errors};
  EXPECT_EQ(audit.Add(s.Of(1, 0, 6)).reason(), "RECALL_COMPLETE");
  const RecallRow row = audit.Report().all;
  for (const auto& [metric, bounds, values] :
       {std::tuple(row.recall, recall, recalls), std::tuple(row.error, error, errors)}) {
    std::vector<uint64_t> want(bounds.size() - 1);
    for (const float x : values) {
      size_t bin = want.size() - 1;
      while (bin > 0 && x < bounds[bin]) --bin;
      ++want[bin];
    }
    EXPECT_EQ(metric.histogram, want);
  }
}

TEST(RecallSamples, ThatAreImpossibleAreNotTaken) {
  RecallAudit audit(1, {.every = 1, .steps = 8}, 2, 1, nullptr);
  const auto refused = [&](const StepSamples& s, int32_t heads, int32_t position = 3) {
    const Status status = audit.Add(s.Of(1, position, heads));
    EXPECT_EQ(status.code(), Code::kDataLoss);
    EXPECT_EQ(status.reason(), "RECALL_SAMPLE") << status.message();
  };
  refused({{0}, {1}, {0}}, 2);
  refused({{}, {}, {}}, 1);
  refused({{0}, {1}, {0}}, 1, -1);
  refused({{2}, {1}, {0}}, 1);
  refused({{-1}, {1}, {0}}, 1);
  refused({{1, 0}, {1, 1}, {0, 0}}, 1);
  refused({{0, 0}, {1, 1}, {0, 0}}, 1);
  refused({{0}, {1, 1}, {0}}, 1);
  refused({{0}, {1.5f}, {0}}, 1);
  refused({{0}, {NAN}, {0}}, 1);
  refused({{0}, {1}, {-1}}, 1);
  refused({{0}, {1}, {INFINITY}}, 1);
  EXPECT_EQ(audit.Progress().steps, 0u);
}

TEST(RecallListener, HearsOfStepsAndOfOneEnd) {
  int heard = 0;
  RecallAudit audit(1, {.every = 1, .steps = 2}, 1, 1, [&heard] { ++heard; });
  const StepSamples s{{0}, {1}, {0}};
  EXPECT_TRUE(audit.Add(s.Of(1, 0, 1)).ok());
  EXPECT_EQ(heard, 1);
  EXPECT_EQ(audit.Add(s.Of(1, 1, 1)).reason(), "RECALL_COMPLETE");
  Status why;
  EXPECT_FALSE(audit.Ended(&why));
  audit.End(OkStatus());
  audit.End(Internal("LATE", ""));
  EXPECT_EQ(heard, 2);
  EXPECT_TRUE(audit.Ended(&why));
  EXPECT_TRUE(why.ok());
  EXPECT_EQ(audit.Add(s.Of(1, 2, 1)).reason(), "RECALL_COMPLETE");
  EXPECT_EQ(audit.Progress().steps, 2u);
}

class StoreRecallTest : public ::testing::Test {
 protected:
  shm::RecallRequest Asked(const TestSequence& s) {
    return session_.reader().Recall(s.opened().slot);
  }
  Result<RecallStart> Start(const TestSequence& s, RecallOptions options = {}) {
    return store_->recalls().StartRecallAudit(s.id(), options, nullptr);
  }
  Status EndOf(const RecallStart& start) {
    Status why = Internal("RUNNING", "");
    (void)start.audit->Ended(&why);
    return why;
  }

  const StepSamples one_{{0}, {0.5f, 0.25f}, {1, 2}};  // SmallModel: 1 layer, 2 query heads
  std::unique_ptr<Store> store_ = NewStore(SmallPools(128, 128));
  TestSession session_{store_.get()};
  TestSequence s_ = TestSequence::Prompt(&session_, "quest{page = 16}", Tokens(40));
};

TEST_F(StoreRecallTest, AsksThroughTheSlotUntilItHasEnough) {
  EXPECT_EQ(Asked(s_).audit, 0u);
  const Result<RecallStart> start = Start(s_, {.every = 4, .steps = 2});
  ASSERT_TRUE(start.ok()) << start.status().ToString();
  EXPECT_EQ(start->sequence.sequence, s_.id());
  EXPECT_EQ(start->sequence.plan.name, "quest");
  const uint32_t audit = start->audit->number();
  EXPECT_EQ(Asked(s_).audit, audit);
  EXPECT_EQ(Asked(s_).every, 4u);
  EXPECT_TRUE(Asked(s_).Samples(40));
  EXPECT_FALSE(Asked(s_).Samples(41));
  store_->recalls().AddRecall(session_.id(), s_.id(), one_.Of(audit, 40, 2));
  store_->recalls().AddRecall(session_.id(), s_.id(), one_.Of(audit + 1, 44, 2));  // no audit's
  store_->recalls().AddRecall(session_.id() + 1, s_.id(),
                              one_.Of(audit, 44, 2));  // another's sequence
  store_->recalls().AddRecall(session_.id(), s_.id() + 1, one_.Of(audit, 44, 2));  // none
  EXPECT_EQ(start->audit->Progress().steps, 1u);
  EXPECT_EQ(EndOf(*start).reason(), "RUNNING");
  store_->recalls().AddRecall(session_.id(), s_.id(), one_.Of(audit, 44, 2));
  EXPECT_TRUE(EndOf(*start).ok());
  EXPECT_EQ(Asked(s_).audit, 0u);
  EXPECT_TRUE(Start(s_).ok());
  EXPECT_NE(Asked(s_).audit, audit) << "late samples of the first would count for the second";
  ExpectClean(*store_);
}

TEST_F(StoreRecallTest, EveryEndTakesTheRequestBack) {
  const auto end = [&](const char* reason, const std::function<void(const RecallStart&)>& how) {
    const Result<RecallStart> start = Start(s_);
    ASSERT_TRUE(start.ok()) << start.status().ToString();
    how(*start);
    EXPECT_EQ(EndOf(*start).reason(), reason);
    EXPECT_EQ(Asked(s_).audit, 0u);
  };
  end("WHY", [&](const RecallStart& r) {
    store_->recalls().EndRecallAudit(s_.id(), r.audit->number() + 1, Internal("OTHER", ""));
    store_->recalls().EndRecallAudit(s_.id(), r.audit->number(), Internal("WHY", ""));
  });
  end("ALL", [&](const RecallStart&) { store_->recalls().EndRecallAudits(Internal("ALL", "")); });
  end("RECALL_SAMPLE", [&](const RecallStart& r) {
    store_->recalls().AddRecall(session_.id(), s_.id(), one_.Of(r.audit->number(), 40, 3));
  });
  end("RECALL_RAW_GONE", [&](const RecallStart& r) {
    RecallSamples none;
    none.audit = r.audit->number();
    none.raw_gone = true;
    store_->recalls().AddRecall(session_.id(), s_.id(), none);
  });
  end("SEQUENCE_CLOSED", [&](const RecallStart&) {
    EXPECT_TRUE(store_->sequences().CloseSequence(session_.id(), s_.id()).ok());
  });
  EXPECT_EQ(Start(s_).status().reason(), "SEQUENCE_UNKNOWN");
}

TEST_F(StoreRecallTest, TheEndOfItsSessionEndsIt) {
  const Result<RecallStart> start = Start(s_);
  ASSERT_TRUE(start.ok());
  store_->sessions().EndSession(session_.id(), SessionEnd::kEof);
  EXPECT_EQ(EndOf(*start).reason(), "SESSION_ENDED");
}

TEST_F(StoreRecallTest, AForkIsNotAsked) {
  ASSERT_TRUE(Start(s_).ok());
  const Result<TestSequence> fork = s_.Fork();
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(Asked(*fork).audit, 0u);
  EXPECT_TRUE(Start(*fork).ok());
  EXPECT_EQ(Start(s_).status().reason(), "RECALL_RUNNING");
}

TEST_F(StoreRecallTest, OptionsNameTheirRange) {
  const auto expect = [&](RecallOptions options, const char* words) {
    const Status status = Start(s_, options).status();
    EXPECT_EQ(status.reason(), "RECALL_OPTION");
    EXPECT_THAT(status.message(), HasSubstr(words));
  };
  expect({.every = 0}, "every is 0; allowed: 1 .. 65536");
  expect({.steps = 0}, "steps is 0; allowed: 1 .. 1024");
  expect({.steps = 1025}, "steps is 1025");
  ModelDesc wide = testing::SmallModel();
  wide.digest = "wide";
  wide.geometry.layers = 16;
  wide.geometry.query_heads = 256;
  const Result<uint64_t> model = store_->models().RegisterModel(session_.id(), wide);
  ASSERT_TRUE(model.ok());
  const auto opened = store_->openings().OpenSequence(session_.id(), *model, "full", Tokens(4));
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  const Status status =
      store_->recalls().StartRecallAudit(opened->sequence, {.steps = 257}, {}).status();
  EXPECT_THAT(status.message(), HasSubstr("16 layers of 256 query heads: 1 .. 256"));
  EXPECT_TRUE(store_->recalls().StartRecallAudit(opened->sequence, {.steps = 256}, {}).ok());
}

// Recall in the background: the store asks by itself, about one step in `recall_every`.
class BackgroundRecallTest : public ::testing::Test {
 protected:
  static std::unique_ptr<Store> StoreThatSamples(uint32_t every) {
    StoreOptions options = SmallPools(512, 128);
    options.recall_every = every;
    return NewStore(options);
  }
  void Serve(uint32_t every, std::string_view plan = "quest{page = 16, min_tokens = 0}") {
    store_ = StoreThatSamples(every);
    session_ = std::make_unique<TestSession>(store_.get());
    s_ = std::make_unique<TestSequence>(TestSequence::Prompt(session_.get(), plan, Tokens(40)));
  }
  void EndPrompt() { ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), s_->id()).ok()); }
  shm::RecallRequest Asked() { return session_->reader().Recall(s_->opened().slot); }
  // Steps until it is asked for a sample, and not much longer than that may take.
  ::testing::AssertionResult Sampled(int most) {
    for (int i = 0; i < most; ++i) {
      EXPECT_TRUE(s_->Append(Tokens(1, 1000 + i)).ok());
      if (Asked().audit != 0) return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure() << "not asked in " << most << " steps";
  }
  void Answer(const StepSamples& samples, int32_t heads = 2) {
    store_->recalls().AddRecall(session_->id(), s_->id(), samples.Of(Asked().audit, 41, heads));
  }
  SampledRecall Of(std::string_view plan) {
    for (const SampledRecall& row : store_->recalls().Sampled()) {
      if (row.plan == plan) return row;
    }
    ADD_FAILURE() << plan;
    return {};
  }

  const StepSamples one_{{0}, {0.5f, 0.25f}, {1, 2}};
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
  std::unique_ptr<TestSequence> s_;
};

TEST_F(BackgroundRecallTest, AsksForTheNextStepAndKeepsItsMeans) {
  Serve(4);
  EXPECT_FALSE(Sampled(40)) << "of a prompt";
  EndPrompt();
  ASSERT_TRUE(Sampled(8));
  EXPECT_EQ(Asked().every, 1u);
  EXPECT_EQ(Of("quest").steps, 0u);
  Answer(one_);
  EXPECT_EQ(Asked().audit, 0u);
  EXPECT_EQ(Of("quest").steps, 1u);
  EXPECT_NEAR(Of("quest").recall, 0.375, 1e-9);
  EXPECT_NEAR(Of("quest").error, 1.5, 1e-9);
  EXPECT_EQ(Of("chess").steps, 0u);
  EXPECT_EQ(Of("other").steps, 0u);
  ExpectClean(*store_);
}

TEST_F(BackgroundRecallTest, IsOneStepInSoMany) {
  Serve(8);
  EndPrompt();
  int sampled = 0;
  for (int i = 0; i < 2000; ++i) {
    ASSERT_TRUE(s_->Append(Tokens(1, 1000 + i)).ok());
    if (Asked().audit == 0) continue;
    ++sampled;
    Answer(one_);
  }
  EXPECT_GT(sampled, 200);
  EXPECT_LT(sampled, 300);
  EXPECT_EQ(Of("quest").steps, static_cast<uint64_t>(sampled));
}

TEST_F(BackgroundRecallTest, LeavesAloneWhatDoesNotSelect) {
  Serve(1, "full");
  EndPrompt();
  EXPECT_FALSE(Sampled(50));
  Serve(1, "quest{page = 16, min_tokens = 4096}");
  EndPrompt();
  EXPECT_FALSE(Sampled(50));
  Serve(0);
  EndPrompt();
  EXPECT_FALSE(Sampled(50));
}

TEST_F(BackgroundRecallTest, WhatNoStepMeasuresIsNotTaken) {
  Serve(1);
  EndPrompt();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const StepSamples wrong[] = {{{}, {}, {}},
                               {{0}, {0.5f}, {1, 2}},
                               {{0}, {nan, 0}, {1, 2}},
                               {{0, 1}, {1, 1, 1, 1}, {0, 0, 0, 0}},
                               {{0}, {-1, 0}, {1, 2}}};
  for (const StepSamples& samples : wrong) {
    ASSERT_TRUE(Sampled(4));
    Answer(samples);
    EXPECT_EQ(Asked().audit, 0u) << "it is over all the same";
  }
  ASSERT_TRUE(Sampled(4));
  Answer(one_, 7);
  EXPECT_EQ(Of("quest").steps, 0u);
}

TEST_F(BackgroundRecallTest, AnOperatorsAuditGoesFirst) {
  Serve(1);
  EndPrompt();
  ASSERT_TRUE(Sampled(4));
  const uint32_t background = Asked().audit;
  const auto start =
      store_->recalls().StartRecallAudit(s_->id(), {.every = 4, .steps = 1}, nullptr);
  ASSERT_TRUE(start.ok()) << start.status().ToString();
  EXPECT_EQ(Asked().audit, start->audit->number());
  EXPECT_EQ(Asked().every, 4u);
  ASSERT_TRUE(s_->Append(Tokens(20, 2000)).ok());
  EXPECT_EQ(Asked().audit, start->audit->number());
  // The answer to what was asked before counts for neither.
  store_->recalls().AddRecall(session_->id(), s_->id(), one_.Of(background, 44, 2));
  EXPECT_EQ(Of("quest").steps, 0u);
  EXPECT_EQ(start->audit->Progress().steps, 0u);
}

TEST_F(BackgroundRecallTest, EndsWithItsSequence) {
  Serve(1);
  EndPrompt();
  ASSERT_TRUE(Sampled(4));
  const Result<TestSequence> fork = s_->Fork();
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(session_->reader().Recall(fork->opened().slot).audit, 0u);
  const uint32_t slot = s_->opened().slot;
  ASSERT_TRUE(store_->sequences().CloseSequence(session_->id(), s_->id()).ok());
  EXPECT_EQ(session_->reader().Recall(slot).audit, 0u);
}

// Words that clients write: they may say anything, and totals only grow.
TEST(SessionTotalsTest, SumsWhatSessionsSayAndOutlivesThem) {
  const auto store = NewStore(SmallPools(64, 64));
  const StepTotals before = ReadSessionTotals().steps;
  TestSession one(store.get()), other(store.get(), "uid:2");
  shm::StepCounts& words = one.segments().header->steps;
  words.decoded = 5;
  words.in_full = 2;
  other.segments().header->steps.decoded = 7;
  EXPECT_EQ(ReadSessionTotals().steps.decoded - before.decoded, 12u);
  EXPECT_EQ(ReadSessionTotals().steps.in_full - before.in_full, 2u);
  words.decoded = 1;
  EXPECT_EQ(ReadSessionTotals().steps.decoded - before.decoded, 12u);
  words.decoded = 4;
  EXPECT_EQ(ReadSessionTotals().steps.decoded - before.decoded, 15u);
  words.selected = ~uint64_t{0};
  EXPECT_EQ(ReadSessionTotals().steps.selected - before.selected, CountedSession::kMostAtOnce);
  words.reused = 3;
  store->sessions().EndSession(one.id(), SessionEnd::kDied);
  EXPECT_EQ(ReadSessionTotals().steps.decoded - before.decoded, 15u);
  EXPECT_EQ(ReadSessionTotals().steps.reused - before.reused, 3u) << "said last";
}

TEST(SessionTotalsTest, DepthIsNoMoreThanARing) {
  const auto store = NewStore(SmallPools(64, 64));
  TestSession one(store.get()), other(store.get());
  one.segments().header->request.tail = 100;
  one.segments().header->request.head = 40;
  other.segments().header->request.tail = 30;
  RingDepths depths = ReadSessionTotals().requests;
  EXPECT_EQ(depths.bytes, 90u);
  EXPECT_EQ(depths.fullest, 60u);
  one.segments().header->request.tail = ~uint64_t{0};
  other.segments().header->request.head = 31;  // nonsense
  depths = ReadSessionTotals().requests;
  EXPECT_EQ(depths.bytes, shm::kRequestRingBytes);
  EXPECT_EQ(depths.fullest, shm::kRequestRingBytes);
}

}  // namespace
}  // namespace kvstrata
