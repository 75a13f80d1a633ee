// SPDX-License-Identifier: Apache-2.0
// Builds on request: index blocks of a sequence's own plan and of another one, extents of another
// plan's codec, what is missing, closes and cancels, a disk below.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "kernels/codec/codec.h"
#include "kernels/segment/segmenter.h"
#include "server/store/codecs/work_requests.h"
#include "server/work/recompress.h"
#include "tests/fakes/copying_codec.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/disk_machine.h"
#include "tests/server/store_fixture.h"

namespace kvstrata::testing {
namespace {

using namespace std::chrono_literals;

constexpr char kQuest[] = "quest{min_tokens = 0}";
constexpr uint32_t kBlock = 512;  // tokens of quest's index blocks over the small model

class BuildTest : public ::testing::Test {
 protected:
  ~BuildTest() override { control_->Hold(false); }

  void Start(WorkOptions work = {}, bool gpu = false, bool codec = false) {
    StoreOptions options = SmallPools(1024, 1024);
    if (codec) {
      options.new_recompressor = [this](const Plan& plan, const Geometry& geometry,
                                        ParametersPtr) -> std::unique_ptr<Recompressor> {
        if (plan.codec == CodecKind::kRaw) return nullptr;
        return std::make_unique<CopyingCodec>(control_, geometry);
      };
    }
    if (gpu) {
      auto fail = std::make_shared<std::atomic<bool>>(false);
      store_ = std::move(
          *Store::Create(options, std::make_unique<FakeGpuMemory>(fail), NewHostMemory()));
    } else {
      store_ = NewStore(options);
    }
    session_ = std::make_unique<TestSession>(store_.get());
    queue_ = std::make_unique<RecompressQueue>(work, store_.get(), &Backends().front());
  }
  TestSequence Prompt(std::string_view plan, int32_t n) {
    return TestSequence::Prompt(session_.get(), plan, Tokens(n));
  }
  using Built = std::future<Result<BuildResult>>;
  Built Ask(const TestSequence& s, const std::string& plan = "", uint64_t session = 0) {
    auto done = std::make_shared<std::promise<Result<BuildResult>>>();
    Built answer = done->get_future();
    const Result<BuildResult> now = store_->builds().Build(
        {session, s.id(), plan},
        [done](const Result<BuildResult>& built) { done->set_value(built); });
    if (!now.ok() || now->done) done->set_value(now);
    return answer;
  }
  static Result<BuildResult> Await(Built answer) {
    if (answer.wait_for(20s) == std::future_status::ready) return answer.get();
    return Status(Code::kDeadlineExceeded, "TEST", "not built");
  }
  Result<BuildResult> Build(const TestSequence& s, const std::string& plan = "",
                            uint64_t session = 0) {
    return Await(Ask(s, plan, session));
  }

  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
  std::unique_ptr<RecompressQueue> queue_;
};

// What the segmenter writes for the leading `tokens`, of pages that the test can read.
std::vector<std::byte> Summaries(const TestSequence& s, const shm::TableView& table,
                                 uint32_t tokens) {
  const Geometry& g = s.opened().geometry;
  const IndexLayout index = IndexOf(s.opened().plan, g);
  std::vector<std::byte*> pages, blocks;
  for (uint32_t i = 0; i < table.pages; ++i) pages.push_back(s.At(table.page(i)));
  std::vector<std::byte> rows(static_cast<size_t>(index.block_bytes) * (tokens / kBlock));
  for (uint32_t i = 0; i < tokens / kBlock; ++i) {
    blocks.push_back(rows.data() + i * static_cast<size_t>(index.block_bytes));
  }
  SequenceView view;
  view.pages = pages.data();
  view.index_blocks = blocks.data();
  view.tokens = static_cast<int32_t>(tokens);
  SegmenterOf(s.opened().plan.segmenter())
      .Update(g, index, view, 0, static_cast<int32_t>(tokens), Backends().front(),
              InlineExecutor());
  return rows;
}

void ExpectIndexed(const TestSequence& s, uint32_t tokens) {
  const shm::TableView table = s.Table();
  const IndexLayout index = IndexOf(s.opened().plan, s.opened().geometry);
  ASSERT_EQ(static_cast<uint32_t>(index.block_tokens), kBlock);
  const std::vector<std::byte> want = Summaries(s, table, tokens);
  const auto bytes = static_cast<size_t>(index.block_bytes);
  for (uint32_t i = 0; i < tokens / kBlock; ++i) {
    EXPECT_NE(table.index_block(i)->flags & shm::kPageSealed, 0) << "block " << i;
    EXPECT_EQ(std::memcmp(s.At(table.index_block(i)), want.data() + i * bytes, bytes), 0)
        << "block " << i;
  }
}

// A held prefix that was computed for a plan without an index.
TEST_F(BuildTest, AHeldPrefixGetsItsPlansIndex) {
  Start();
  TestSequence full = Prompt("full", 1600);
  Result<OpenedSequence> opened = session_->Open(kQuest, Tokens(1600));
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  EXPECT_EQ(opened->held_tokens, 1584u);
  EXPECT_EQ(opened->indexed_tokens, 0u);
  const TestSequence s(session_.get(), *opened, Tokens(1600));
  const uint64_t version = s.Table().table->version;
  const Result<BuildResult> built = Build(s);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  EXPECT_EQ(built->indexed_tokens, 3 * kBlock);
  EXPECT_EQ(built->built_blocks, 3u);
  EXPECT_EQ(built->plan, FormatPlan(opened->plan));
  EXPECT_GT(s.Table().table->version, version);
  ExpectIndexed(s, 3 * kBlock);
  ExpectClean(*store_);
  // Again: nothing is left to do. The next one finds it.
  const Result<BuildResult> again = Build(s);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->built_blocks, 0u);
  EXPECT_EQ(again->indexed_tokens, 3 * kBlock);
  EXPECT_EQ(session_->Open(kQuest, Tokens(1600))->indexed_tokens, 3 * kBlock);
  ExpectClean(*store_);
}

TEST_F(BuildTest, AnotherPlansIndexIsKeptBeside) {
  Start();
  TestSequence full = Prompt("full", 1600);
  const uint64_t version = full.Table().table->version;
  const Result<BuildResult> built = Build(full, kQuest);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  EXPECT_EQ(built->indexed_tokens, 3 * kBlock);
  EXPECT_EQ(built->built_blocks, 3u);
  EXPECT_EQ(full.Table().table->version, version) << "its own table is none of that";
  ExpectClean(*store_);
  const Result<OpenedSequence> opened = session_->Open(kQuest, Tokens(1600));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->indexed_tokens, 3 * kBlock);
  ExpectIndexed(TestSequence(session_.get(), *opened, Tokens(1600)), 3 * kBlock);
  EXPECT_EQ(Build(full, kQuest)->built_blocks, 0u);
  ExpectClean(*store_);
}

TEST_F(BuildTest, RowsOnAnotherMemoryAreCopiedFirst) {
  Start({}, true);
  TestSequence full = Prompt("full", 1100);
  const Result<BuildResult> built = Build(full, kQuest);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  EXPECT_EQ(built->indexed_tokens, 2 * kBlock);
  const Result<OpenedSequence> opened = session_->Open(kQuest, Tokens(1100));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->indexed_tokens, 2 * kBlock);
  ExpectIndexed(TestSequence(session_.get(), *opened, Tokens(1100)), 2 * kBlock);
  ExpectClean(*store_);
}

// Rows that a client wrote are not made again: what it wrote is in the sealed block.
TEST_F(BuildTest, ABlockThatWasBegunIsCompleted) {
  Start();
  TestSequence s = Prompt(kQuest, 300);
  ASSERT_TRUE(s.Append(Tokens(300, 5000)).ok());  // indexed up to 288 in this step's begin
  const Result<BuildResult> built = Build(s);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  EXPECT_EQ(built->indexed_tokens, kBlock);
  s.ExpectIntact();  // canaries of the client's rows
  ExpectClean(*store_);
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(s.Append(i).ok());
  ExpectClean(*store_);
}

TEST_F(BuildTest, ForksAndClosesLeaveTheBooksRight) {
  Start();
  TestSequence full = Prompt("full", 1600);
  const Result<OpenedSequence> opened = session_->Open(kQuest, Tokens(1600));
  TestSequence s(session_.get(), *opened, Tokens(1600));
  Result<TestSequence> fork = s.Fork();
  ASSERT_TRUE(fork.ok());
  ASSERT_TRUE(Build(s).ok());
  ExpectClean(*store_);
  ASSERT_TRUE(Build(*fork).ok());
  ExpectClean(*store_);
  EXPECT_EQ(s.Table().index_block(0)->offset, fork->Table().index_block(0)->offset) << "shared";
  ASSERT_TRUE(s.Close().ok());
  ASSERT_TRUE(fork->Close().ok());
  ASSERT_TRUE(full.Close().ok());
  ExpectClean(*store_);
  (void)store_->eviction().Evict(false);
  store_->references().Reclaim();
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

TEST_F(BuildTest, WhatIsMissingIsNamed) {
  Start({}, false, true);
  TestSequence full = Prompt("full", 600);
  const auto expect = [](const Result<BuildResult>& built, const std::string& reason,
                         const std::string& what) {
    SCOPED_TRACE(what);  // which of them
    ASSERT_FALSE(built.ok());
    EXPECT_EQ(built.status().reason(), reason);
    EXPECT_NE(built.status().message().find(what), std::string::npos) << built.status().message();
  };
  expect(Build(full, "sentencekv"), "BUILD_INPUT", "queries of the prompt's last 32 tokens");
  expect(Build(full, "sekv"), "BUILD_INPUT", "surprisal");
  expect(Build(full, "nonsense"), "PLAN_UNKNOWN", "nonsense");
  expect(Build(full, "quest{page = 10}"), "BUILD_BLOCKS", "520");
  EXPECT_EQ(store_->builds().Build({0, 4711, ""}, nullptr).status().reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(store_->builds().Build({4711, full.id(), ""}, nullptr).status().reason(),
            "SESSION_UNKNOWN");
  TestSession other(store_.get(), "uid:2");
  expect(Build(full, "", other.id()), "SEQUENCE_UNKNOWN", "none of session");

  // Their own plans.
  TestSequence sentences = Prompt("sentencekv", 600);
  expect(Build(sentences), "BUILD_INPUT", "mark it complete");
  ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), sentences.id()).ok());
  expect(Build(sentences, "", session_->id()), "BUILD_INPUT", "sentence ends");
  const std::vector<uint8_t> ends(600, 0);
  ASSERT_TRUE(store_->steps()
                  .Report(session_->id(), sentences.id(), 0, 600, nullptr, nullptr, ends.data())
                  .ok());
  expect(Build(sentences), "BUILD_BUCKETS", "kvs_sequence_build");
  EXPECT_TRUE(Build(sentences, "", session_->id()).ok()) << "its owner makes them";
  const Result<BuildResult> none = Build(full);
  ASSERT_TRUE(none.ok()) << "a plan without an index has all it needs";
  EXPECT_EQ(none->built_blocks, 0u);
  ExpectClean(*store_);
}

TEST_F(BuildTest, ItNeedsWorkers) {
  Start({.threads = 0});
  TestSequence full = Prompt("full", 600);
  EXPECT_EQ(Build(full, kQuest).status().reason(), "WORK_STOPPED");
}

TEST_F(BuildTest, AnotherPlansExtentsBecomeAnArtefact) {
  Start({}, false, true);
  const std::string plan = "mosaickv{min_tokens = 0, keep_raw = \"host\"}";
  TestSequence full = Prompt("full", 610);
  const Result<BuildResult> built = Build(full, plan);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  EXPECT_EQ(built->extents, 19u);
  EXPECT_EQ(store_->inspection().Counters().artefacts, 1u);
  ExpectClean(*store_);
  const int runs = control_->runs;
  TestSequence s = Prompt(plan, 610);
  ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
  EXPECT_EQ(store_->inspection().Counters().artefact_hits, 1u);
  EXPECT_EQ(s.Table().extents(), 19u);
  EXPECT_EQ(control_->runs, runs) << "nothing is packed again";
  s.ExpectIntact();
  EXPECT_EQ(Build(full, plan)->extents, 19u);
  EXPECT_EQ(control_->runs, runs);
  ExpectClean(*store_);
}

TEST_F(BuildTest, OneBuildOfASequenceAtATime) {
  Start({}, false, true);
  control_->Hold(true);
  TestSequence full = Prompt("full", 610);
  const std::string plan = "mosaickv{min_tokens = 0}";
  Built first = Ask(full, plan), second = Ask(full, plan);
  EXPECT_EQ(Build(full, kQuest).status().reason(), "BUILD_RUNNING");
  ASSERT_EQ(store_->requests().Work().size(), 1u);
  EXPECT_EQ(store_->requests().Work()[0].plan, "mosaickv");
  EXPECT_EQ(store_->requests().Work()[0].sequence, full.id());
  EXPECT_EQ(store_->requests().Work()[0].state.substr(0, 5), "build");
  control_->Hold(false);
  EXPECT_TRUE(Await(std::move(first)).ok());
  EXPECT_TRUE(Await(std::move(second)).ok());
  EXPECT_TRUE(store_->requests().Work().empty());
}

TEST_F(BuildTest, ACloseAndACancelEndIt) {
  Start({}, false, true);
  control_->Hold(true);
  TestSequence closed = Prompt("full", 610);
  Built first = Ask(closed, "mosaickv{min_tokens = 0}");
  ASSERT_TRUE(closed.Close().ok());
  EXPECT_EQ(Await(std::move(first)).status().reason(), "SEQUENCE_CLOSED");
  TestSequence cancelled = Prompt("full", 700);
  Built second = Ask(cancelled, "mosaickv{min_tokens = 0}");
  EXPECT_TRUE(store_->requests().Cancel(0, cancelled.id()).ok());
  EXPECT_EQ(Await(std::move(second)).status().reason(), "WORK_CANCELLED");
  Built third = Ask(cancelled, "mosaickv{min_tokens = 0}");
  queue_->Stop();
  EXPECT_EQ(Await(std::move(third)).status().reason(), "WORK_STOPPED");
  EXPECT_EQ(store_->inspection().Counters().artefacts, 0u);
  ExpectClean(*store_);
}

TEST_F(BuildTest, AWishToTruncateTellsWhoWaits) {
  Start({}, false, true);
  control_->Hold(true);
  TestSequence s = Prompt("full", 610);
  ASSERT_TRUE(store_->sequences().GiveKey(session_->id(), s.opened(), "a").ok());
  Built built = Ask(s, "mosaickv{min_tokens = 0}");
  ASSERT_TRUE(store_->sequences().TruncateKey(session_->id(), "a", 600).ok());
  ASSERT_EQ(built.wait_for(0s), std::future_status::ready) << "nobody else calls the store";
  EXPECT_EQ(built.get().status().reason(), "SEQUENCE_TRUNCATED");
}

TEST_F(BuildTest, AFullQueueRefuses) {
  Start({.threads = 1, .queue = 1}, false, true);
  control_->Hold(true);
  std::vector<TestSequence> sequences;
  std::vector<Built> answers;
  std::string refused;
  for (int i = 0; i < 4; ++i) {
    sequences.push_back(TestSequence::Prompt(session_.get(), "full", Tokens(40, i * 1000)));
    answers.push_back(Ask(sequences.back(), "mosaickv{min_tokens = 0}"));
    if (answers.back().wait_for(0s) == std::future_status::ready) {
      refused = answers.back().get().status().reason();
    }
  }
  EXPECT_EQ(refused, "WORK_QUEUE");
  control_->Hold(false);
}

// The own plan with an index and a codec: both, and the answer comes after the second.
TEST_F(BuildTest, IndexAndExtentsOfTheOwnPlan) {
  Start({}, false, true);
  TestSequence full = Prompt("full", 1200);
  const std::string plan = "{selector = \"minmax\", codec = \"packed\", min_tokens = 0}";
  const Result<OpenedSequence> opened = session_->Open(plan, Tokens(1200));
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  const TestSequence s(session_.get(), *opened, Tokens(1200));
  const Result<BuildResult> built = Build(s, plan);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  EXPECT_EQ(built->indexed_tokens, 2 * kBlock);
  EXPECT_EQ(built->extents, 37u);
  EXPECT_TRUE(store_->requests().Work().empty());
  s.ExpectExtents(s.Table());
  ExpectClean(*store_);
}

TEST(BuildDiskTest, WhatWasBuiltIsFoundAfterARestart) {
  const ScratchDir dir;
  DiskTierOptions disk;
  disk.directory = dir / "tier";
  disk.budget_bytes = 16 << 20;
  disk.segment_bytes = 1 << 20;
  {
    const Machine machine(disk, {}, 512);
    TestSession session(machine.store.get());
    RecompressQueue queue({}, machine.store.get(), &Backends().front());
    const TestSequence full = TestSequence::Prompt(&session, "full", Tokens(1600));
    std::promise<Result<BuildResult>> built;
    const Result<BuildResult> now = machine.store->builds().Build(
        {0, full.id(), kQuest}, [&](const Result<BuildResult>& r) { built.set_value(r); });
    ASSERT_TRUE(now.ok()) << now.status().ToString();
    ASSERT_FALSE(now->done);
    ASSERT_EQ(built.get_future().get()->built_blocks, 3u);
    machine.Settle();
  }
  const Machine machine(disk, {}, 512);
  TestSession session(machine.store.get());
  const Result<OpenedSequence> opened = machine.Open(session, kQuest, Tokens(1600));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->held_tokens, 1584u);
  EXPECT_EQ(opened->indexed_tokens, 3 * kBlock);
  ExpectIndexed(TestSequence(&session, *opened, Tokens(1600)), 3 * kBlock);
  ExpectClean(*machine.store);
}

}  // namespace
}  // namespace kvstrata::testing
