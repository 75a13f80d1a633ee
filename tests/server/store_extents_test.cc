// SPDX-License-Identifier: Apache-2.0
// Extents in the store: published beside pages, raw pages released or moved, shared, held,
// retired; what fails leaves the sequence as it was.
#include <gtest/gtest.h>

#include <random>

#include "server/store/store_parts.h"
#include "tests/fakes/copying_codec.h"
#include "tests/server/recompress_now.h"
#include "tests/server/store_fixture.h"

namespace kvstrata {

// Reaches into the store to break it, and to say `keep_raw` where plans cannot yet.
struct AuditTestPeer {
  static Sequence& SequenceOf(Store& store, uint64_t id) KVS_NO_THREAD_SAFETY_ANALYSIS {
    return *store.parts_->catalog.SequenceOf(id);
  }
};

namespace {

using testing::CodecControl;
using testing::CopyingCodec;
using testing::ExpectClean;
using testing::NewStore;
using testing::Recompress;
using testing::SmallModel;
using testing::SmallPools;
using testing::TestSequence;
using testing::TestSession;
using testing::Tokens;
using testing::UsedBytes;

constexpr uint64_t kPage = 4096;

class ExtentsTest : public ::testing::Test {
 protected:
  StoreOptions Options(uint64_t device_pages, uint64_t host_pages) {
    StoreOptions options = SmallPools(device_pages, host_pages);
    options.recompress_retry = std::chrono::microseconds(0);
    options.new_recompressor = [this](const Plan& plan, const Geometry& geometry,
                                      ParametersPtr) -> std::unique_ptr<Recompressor> {
      if (plan.selector == SelectorKind::kFull) return nullptr;
      return std::make_unique<CopyingCodec>(control_, geometry);
    };
    return options;
  }
  void Start(uint64_t device_pages = 256, uint64_t host_pages = 256) {
    session_.reset();
    store_ = NewStore(Options(device_pages, host_pages));
    session_ = std::make_unique<TestSession>(store_.get());
  }
  TestSequence Prompt(int32_t n, KeepRaw keep, std::string_view plan = "window", int first = 0) {
    const std::vector<int32_t> tokens = Tokens(n, first);
    Result<OpenedSequence> opened = session_->Open(plan, tokens);
    EXPECT_TRUE(opened.ok()) << opened.status().ToString();
    AuditTestPeer::SequenceOf(*store_, opened->sequence).plan.stored.keep_raw = keep;
    TestSequence s(session_.get(), *opened, tokens);
    EXPECT_TRUE(s.Append(std::span(tokens).subspan(opened->held_tokens)).ok());
    return s;
  }
  SequenceInfo Info(const TestSequence& s) const {
    const Result<SequenceDetail> detail = store_->inspection().Show(s.id());
    EXPECT_TRUE(detail.ok());
    return detail->info;
  }
  uint32_t Held(int32_t n, int first = 0) {
    return store_->lookups()
        .Lookup(session_->id(), session_->model(), Tokens(n, first))
        ->held_tokens();
  }
  uint64_t Retired() const {
    uint64_t bytes = 0;
    for (const PoolInfo& pool : store_->inspection().Pools()) bytes += pool.retired_bytes;
    return bytes;
  }

  std::shared_ptr<CodecControl> control_ = std::make_shared<CodecControl>();
  std::unique_ptr<Store> store_;
  std::unique_ptr<TestSession> session_;
};

TEST_F(ExtentsTest, ATableNamesThem) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kHost);
  const uint64_t version = s.Table().table->version;
  EXPECT_EQ(s.Table().extents(), 0u);
  const Result<RecompressResult> done = Recompress(store_.get(), s.id());
  ASSERT_TRUE(done.ok()) << done.status().ToString();
  EXPECT_EQ(done->extents, 3u);
  EXPECT_EQ(done->written_bytes, 3 * (64 + 32 * 128 + 64));
  EXPECT_GT(s.Table().table->version, version);
  ASSERT_EQ(s.Table().extents(), 3u);
  EXPECT_EQ(s.Table().extent(2)->begin, 64);
  EXPECT_EQ(s.Table().extent(2)->end, 96);
  EXPECT_FALSE(session_->grants().at(s.Table().extent(0)->arena)) << "clients only read extents";
  s.ExpectIntact();
  ExpectClean(*store_);

  const Result<SequenceDetail> detail = store_->inspection().Show(s.id());
  ASSERT_EQ(detail->extents.size(), 3u);
  EXPECT_EQ(detail->extents[1].kind, ExtentKind::kRawRows);
  EXPECT_EQ(detail->extents[1].tokens, (kvstrata::Run{32, 64}));
  EXPECT_EQ(detail->info.extents, 3u);
  EXPECT_EQ(detail->info.extent_device_bytes, 3 * 2 * kPage);
  EXPECT_EQ(detail->info.extent_host_bytes, 0u);
  EXPECT_EQ(Recompress(store_.get(), s.id()).status().reason(), "WORK_NOTHING");
}

// What a GPU has packed lacks its front, which the host has.
TEST_F(ExtentsTest, AnExtentOfTheDeviceGetsItsFrontWhenItIsCopied) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kHost);
  Result<RecompressJob> job = store_->recompression().TakeRecompression(s.id());
  ASSERT_TRUE(job.ok()) << job.status().ToString();
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  Result<RecompressOutput> ran = next->Run(job->input);
  ASSERT_TRUE(ran.ok()) << ran.status().ToString();
  for (ExtentDraft& draft : ran->extents) {
    const auto on_device = std::make_shared<std::vector<std::byte>>(draft.bytes);
    std::fill_n(on_device->begin(), sizeof(ExtentHeader), std::byte{0xEE});
    draft.bytes.resize(sizeof(ExtentHeader));
    draft.on_device = {std::shared_ptr<const std::byte>(on_device, on_device->data()),
                       on_device->size()};
  }
  const Result<RecompressResult> done = store_->recompression().PublishRecompression(
      std::move(*job), std::move(next), std::move(*ran));
  ASSERT_TRUE(done.ok()) << done.status().ToString();
  EXPECT_EQ(done->written_bytes, 3 * (64 + 32 * 128 + 64));
  s.ExpectIntact();
  const Result<SequenceDetail> detail = store_->inspection().Show(s.id());
  ASSERT_EQ(detail->extents.size(), 3u);
  for (int32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(detail->extents[static_cast<size_t>(i)].kind, ExtentKind::kRawRows);
    EXPECT_EQ(detail->extents[static_cast<size_t>(i)].tokens, (kvstrata::Run{32 * i, 32 * i + 32}));
  }
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, RawPagesAreGivenBackAndForgotten) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kNo);
  EXPECT_EQ(Held(100), 96u);
  const Result<RecompressResult> done = Recompress(store_.get(), s.id());
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(done->released_bytes, 6 * kPage);
  EXPECT_EQ(Info(s).absent_pages, 6u);
  EXPECT_EQ(s.Table().page(5)->flags, shm::kPageAbsent);
  EXPECT_EQ(s.Table().page(5)->offset, 0u);
  EXPECT_EQ(s.Table().page(6)->flags & shm::kPageAbsent, 0);
  EXPECT_EQ(Held(100), 0u) << "full on this prefix is a miss";
  // A reader that comes now has nothing to do with what was replaced.
  const int reader = session_->reader().Enter();
  store_->references().Reclaim();
  EXPECT_EQ(Retired(), 0u);
  session_->reader().Leave(reader);
  s.ExpectIntact();
  ExpectClean(*store_);
  // It goes on: commits, grows, forks, moves.
  for (int i = 0; i < 80; ++i) ASSERT_TRUE(s.Append(1000 + i).ok());
  s.ExpectIntact();
  Result<TestSequence> child = s.Fork();
  ASSERT_TRUE(child.ok());
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  ASSERT_TRUE(store_->moves().Move(s.id(), Tier::kHost).ok());
  ASSERT_TRUE(s.Append(5).ok());
  ASSERT_TRUE(child->Append(6).ok());
  s.ExpectIntact();
  child->ExpectIntact();
  ExpectClean(*store_);
  ASSERT_TRUE(s.Close().ok());
  ASSERT_TRUE(child->Close().ok());
  (void)store_->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, PagesBehindAHoleAreNotCachedInVain) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kNo);
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(s.Append(1000 + i).ok());
  ASSERT_TRUE(s.Close().ok());
  EXPECT_EQ(store_->eviction().Evict(true).pages(), 0u);
  store_->references().Reclaim();
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, RawPagesOfOthersStay) {
  Start();
  TestSequence full = Prompt(100, KeepRaw::kAuto, "full");
  TestSequence s = Prompt(100, KeepRaw::kNo);
  ASSERT_EQ(s.opened().held_tokens, 96u);
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(Info(s).absent_pages, 6u);
  EXPECT_EQ(Held(100), 96u) << "somebody else holds them";
  full.ExpectIntact();
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, RawPagesMoveToHostAndStayReadable) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kHost);
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(Info(s).absent_pages, 0u);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(s.Table().page(static_cast<uint32_t>(i))->tier, 1);
  EXPECT_EQ(s.Table().page(6)->tier, 0);
  EXPECT_EQ(Held(100), 96u);
  s.ExpectIntact();
  // The next one with this prefix finds them there, and moves nothing.
  TestSequence other = Prompt(100, KeepRaw::kHost, "window{n_recent = 100}");
  EXPECT_EQ(other.opened().held_tokens, 96u);
  const Result<RecompressResult> done = Recompress(store_.get(), other.id());
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(done->released_bytes, 0u);
  other.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, TwoOfOnePrefixShareTheHostCopies) {
  Start();
  TestSequence a = Prompt(100, KeepRaw::kAuto);
  TestSequence b = Prompt(100, KeepRaw::kAuto, "window{n_recent = 100}");
  ASSERT_EQ(b.opened().held_tokens, 96u);
  ASSERT_TRUE(Recompress(store_.get(), a.id()).ok());
  ASSERT_TRUE(Recompress(store_.get(), b.id()).ok());
  for (uint32_t i = 0; i < 6; ++i) {
    EXPECT_EQ(a.Table().page(i)->offset, b.Table().page(i)->offset);
    EXPECT_EQ(b.Table().page(i)->tier, 1);
  }
  a.ExpectIntact();
  b.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, AutoGivesBackWhenHostIsFull) {
  Start(256, 0);
  TestSequence s = Prompt(100, KeepRaw::kAuto);
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(Info(s).absent_pages, 6u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, HostWithoutRoomKeepsThemWhereTheyAreAndSaysSo) {
  Start(256, 0);
  TestSequence s = Prompt(100, KeepRaw::kHost);
  const Status status = Recompress(store_.get(), s.id()).status();
  EXPECT_EQ(status.reason(), "POOL_EXHAUSTED") << status.ToString();
  EXPECT_EQ(Info(s).absent_pages, 0u);
  EXPECT_EQ(Info(s).extents, 3u) << "the extents are there";
  EXPECT_NE(Info(s).work_error.find("POOL_EXHAUSTED"), std::string::npos);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, RowsThatTheIndexStillWantsStay) {
  Start();
  control_->unit = 16;
  // The index says nothing before the next step catches up.
  TestSequence s = Prompt(64, KeepRaw::kNo, "quest{page = 16}");
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(Info(s).absent_pages, 0u);
  ASSERT_TRUE(s.Append(Tokens(16, 500)).ok());  // indexes 64 tokens
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(Info(s).absent_pages, 4u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, ExtentsLieWhereTheDraftAsks) {
  Start();
  control_->tier = Tier::kHost;
  TestSequence s = Prompt(40, KeepRaw::kNo);
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(s.Table().extent(0)->tier, 1);
  EXPECT_EQ(Info(s).extent_host_bytes, 2 * kPage);
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, AForkSharesThemByReference) {
  Start();
  TestSequence parent = Prompt(100, KeepRaw::kNo);
  ASSERT_TRUE(Recompress(store_.get(), parent.id()).ok());
  Result<TestSequence> child = parent.Fork();
  ASSERT_TRUE(child.ok());
  ASSERT_EQ(child->Table().extents(), 3u);
  EXPECT_EQ(child->Table().extent(1)->offset, parent.Table().extent(1)->offset);
  EXPECT_EQ(store_->inspection().Show(parent.id())->extents[0].references, 2u);
  EXPECT_EQ(Recompress(store_.get(), child->id()).status().reason(), "WORK_NOTHING")
      << "it has its parent's state";
  ASSERT_TRUE(parent.Append(Tokens(64, 700)).ok());
  ASSERT_TRUE(child->Append(Tokens(64, 800)).ok());
  ASSERT_TRUE(Recompress(store_.get(), parent.id()).ok());
  ASSERT_TRUE(Recompress(store_.get(), child->id()).ok());
  EXPECT_EQ(child->Table().extents(), 5u);
  EXPECT_NE(child->Table().extent(4)->offset, parent.Table().extent(4)->offset);
  parent.ExpectIntact();
  ExpectClean(*store_);
  ASSERT_TRUE(parent.Close().ok());
  child->ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, AForkOfARunningSequenceHasTheOldState) {
  Start();
  TestSequence parent = Prompt(100, KeepRaw::kNo);
  Result<RecompressJob> job = store_->recompression().TakeRecompression(parent.id());
  ASSERT_TRUE(job.ok());
  Result<TestSequence> child = parent.Fork();
  ASSERT_TRUE(child.ok());
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  Result<RecompressOutput> ran = next->Run(job->input);
  ASSERT_TRUE(store_->recompression()
                  .PublishRecompression(std::move(*job), std::move(next), std::move(*ran))
                  .ok());
  EXPECT_EQ(child->Table().extents(), 0u);
  ASSERT_TRUE(Recompress(store_.get(), child->id()).ok());
  EXPECT_EQ(child->Table().extents(), 3u);
  parent.ExpectIntact();
  child->ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, AParkedReaderKeepsItsBytesThroughManyRecompressions) {
  Start();
  control_->unit = 16;
  control_->merge = true;  // every run replaces everything
  TestSequence s = Prompt(100, KeepRaw::kNo);
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  const TestSequence parked_as = s;
  const int reader = session_->reader().Enter();
  const shm::TableView parked = s.Table();
  std::vector<std::byte> before(s.At(parked.page(6)), s.At(parked.page(6)) + kPage);
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(s.Append(Tokens(16, 1000 + 16 * i)).ok());
    const Result<RecompressResult> done = Recompress(store_.get(), s.id());
    ASSERT_TRUE(done.ok()) << i << " " << done.status().ToString();
    parked_as.ExpectIntact(parked);
  }
  EXPECT_EQ(std::memcmp(before.data(), s.At(parked.page(6)), 4 * 128), 0);
  EXPECT_GT(Retired(), 30 * kPage);
  ExpectClean(*store_);
  session_->reader().Leave(reader);
  store_->references().Reclaim();
  EXPECT_EQ(Retired(), 0u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, WhatAJobReadsIsNotFreed) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kNo);
  const uint64_t used = UsedBytes(*store_);
  Result<RecompressJob> job = store_->recompression().TakeRecompression(s.id());
  ASSERT_TRUE(job.ok());
  EXPECT_EQ(store_->recompression().TakeRecompression(s.id()).status().reason(), "WORK_NOTHING")
      << "one at a time";
  ExpectClean(*store_);
  ASSERT_TRUE(s.Close().ok());
  EXPECT_TRUE(job->cancelled->load());
  (void)store_->eviction().Evict(false);
  store_->references().Reclaim();
  ExpectClean(*store_);
  EXPECT_EQ(UsedBytes(*store_), used);
  EXPECT_EQ(Retired(), used);
  // Somebody else cannot get at them meanwhile.
  TestSequence other = Prompt(100, KeepRaw::kNo, "full", 9000);
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  job->input.cancelled = nullptr;
  std::atomic<bool> no{false};
  job->input.cancelled = &no;
  Result<RecompressOutput> ran = next->Run(job->input);
  ASSERT_TRUE(ran.ok());
  EXPECT_EQ(store_->recompression()
                .PublishRecompression(std::move(*job), std::move(next), std::move(*ran))
                .status()
                .reason(),
            "SEQUENCE_UNKNOWN");
  ExpectClean(*store_);
  EXPECT_EQ(Retired(), 0u);
  ASSERT_TRUE(other.Close().ok());
  (void)store_->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

TEST_F(ExtentsTest, AJobOutlivesItsSession) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kNo);
  Result<RecompressJob> job = store_->recompression().TakeRecompression(s.id());
  ASSERT_TRUE(job.ok());
  store_->sessions().EndSession(session_->id(), SessionEnd::kDied);
  (void)store_->eviction().Evict(false);
  ExpectClean(*store_);
  // Its rows can still be read: the arenas are there.
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  std::atomic<bool> no{false};
  job->input.cancelled = &no;
  ASSERT_TRUE(next->Run(job->input).ok());
  store_->recompression().AbandonRecompression(std::move(*job),
                                               Status(Code::kAborted, "CANCELLED", "closed"));
  ExpectClean(*store_);
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

TEST_F(ExtentsTest, AFullPoolLeavesTheRowsRawAndSaysSo) {
  Start(64, 0);
  TestSequence s = Prompt(100, KeepRaw::kNo);
  // Two of three would fit: all or nothing.
  control_->padding = 12 * 4096;
  EXPECT_EQ(Recompress(store_.get(), s.id()).status().reason(), "POOL_EXHAUSTED");
  ExpectClean(*store_);
  control_->padding = 100 * 4096;
  const Status status = Recompress(store_.get(), s.id()).status();
  EXPECT_EQ(status.reason(), "POOL_EXHAUSTED") << status.ToString();
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(Info(s).extents, 0u);
  EXPECT_EQ(Info(s).absent_pages, 0u);
  EXPECT_NE(Info(s).work_error.find("POOL_EXHAUSTED"), std::string::npos);
  ASSERT_EQ(store_->requests().Work().size(), 1u);
  EXPECT_EQ(store_->requests().Work()[0].state, "due");
  EXPECT_EQ(store_->inspection().Counters().recompress_failures, 2u);
  s.ExpectIntact();
  ExpectClean(*store_);
  control_->padding = 0;
  ASSERT_TRUE(s.Append(1).ok());
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(Info(s).work_error, "");
  EXPECT_EQ(Info(s).extents, 3u);
  EXPECT_TRUE(store_->requests().Work().empty());
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, DraftsThatMakeNoSenseAreRefused) {
  Start();
  control_->nonsense = true;
  TestSequence s = Prompt(100, KeepRaw::kNo);
  EXPECT_EQ(Recompress(store_.get(), s.id()).status().reason(), "DRAFT_INVALID");
  EXPECT_EQ(Info(s).extents, 0u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ExtentsTest, CommitsWhileAJobRunsAreKept) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kNo);
  Result<RecompressJob> job = store_->recompression().TakeRecompression(s.id());
  ASSERT_TRUE(job.ok());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(s.Append(3000 + i).ok());
  ASSERT_TRUE(store_->moves().Move(s.id(), Tier::kHost).ok());
  std::unique_ptr<Recompressor> next = job->recompressor->Clone();
  Result<RecompressOutput> ran = next->Run(job->input);
  ASSERT_TRUE(store_->recompression()
                  .PublishRecompression(std::move(*job), std::move(next), std::move(*ran))
                  .ok());
  EXPECT_EQ(Info(s).absent_pages, 6u);
  s.ExpectIntact();
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  EXPECT_EQ(Info(s).absent_pages, 12u);
  s.ExpectIntact();
  ExpectClean(*store_);
}

// --- whole prompts -------------------------------------------------------------------------------

class ArtefactTest : public ExtentsTest {
 protected:
  // A prompt that was recompressed, and then decoded on.
  TestSequence Settled(int32_t n, KeepRaw keep, std::string_view plan = "window") {
    TestSequence s = Prompt(n, keep, plan);
    EXPECT_TRUE(store_->steps().PrefillDone(session_->id(), s.id()).ok());
    while (Recompress(store_.get(), s.id()).ok()) {
    }
    return s;
  }
};

TEST_F(ArtefactTest, TheSamePromptNeedsNoWork) {
  Start();
  TestSequence first = Settled(100, KeepRaw::kHost);
  EXPECT_EQ(store_->inspection().Counters().artefacts, 1u);
  const int runs = control_->runs;
  TestSequence second = Prompt(100, KeepRaw::kHost);
  EXPECT_EQ(second.opened().held_tokens, 96u);
  EXPECT_EQ(store_->recompression().TakeRecompression(second.id()).status().reason(),
            "WORK_NOTHING")
      << "nothing is built before its prompt is complete";
  ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), second.id()).ok());
  ASSERT_EQ(second.Table().extents(), 3u);
  EXPECT_EQ(second.Table().extent(0)->offset, first.Table().extent(0)->offset);
  EXPECT_EQ(control_->runs, runs);
  EXPECT_EQ(store_->inspection().Counters().artefact_hits, 1u);
  second.ExpectIntact();
  ExpectClean(*store_);
  // Both go on by themselves.
  ASSERT_TRUE(second.Append(Tokens(40, 600)).ok());
  ASSERT_TRUE(Recompress(store_.get(), second.id()).ok());
  EXPECT_EQ(second.Table().extents(), 4u);
  second.ExpectIntact();
  first.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ArtefactTest, ItOutlivesItsSequenceUntilMemoryIsShort) {
  Start();
  TestSequence first = Settled(100, KeepRaw::kHost);
  ASSERT_TRUE(first.Close().ok());
  ExpectClean(*store_);
  TestSequence second = Settled(100, KeepRaw::kHost);
  EXPECT_EQ(store_->inspection().Counters().artefact_hits, 1u);
  EXPECT_EQ(second.Table().extents(), 3u);
  ASSERT_TRUE(second.Close().ok());
  // All of the device pool: what nobody uses goes.
  TestSequence large = Prompt(250 * 16, KeepRaw::kNo, "full", 50000);
  EXPECT_EQ(store_->inspection().Counters().artefacts, 0u);
  large.ExpectIntact();
  ExpectClean(*store_);
  ASSERT_TRUE(large.Close().ok());
  (void)store_->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

TEST_F(ArtefactTest, AnotherPlanPromptOrTenantHasNoUseForIt) {
  Start();
  TestSequence first = Settled(100, KeepRaw::kHost);
  TestSequence plan = Settled(100, KeepRaw::kHost, "window{n_recent = 99}");
  TestSequence longer = Settled(101, KeepRaw::kHost);
  TestSession stranger(store_.get(), "uid:2");
  TestSequence theirs = TestSequence::Prompt(&stranger, "window", Tokens(100));
  ASSERT_TRUE(store_->steps().PrefillDone(stranger.id(), theirs.id()).ok());
  EXPECT_EQ(store_->inspection().Counters().artefact_hits, 0u);
  ExpectClean(*store_);
}

TEST_F(ArtefactTest, RowsOfOnesOwnAreRecompressedAnew) {
  Start();
  TestSequence first = Settled(100, KeepRaw::kNo);  // its raw pages are gone: no prefix hit
  TestSequence second = Settled(100, KeepRaw::kNo);
  EXPECT_EQ(second.opened().held_tokens, 0u);
  EXPECT_EQ(store_->inspection().Counters().artefact_hits, 0u);
  EXPECT_NE(second.Table().extent(0)->offset, first.Table().extent(0)->offset);
  EXPECT_EQ(store_->inspection().Counters().artefacts, 1u);
  ExpectClean(*store_);
}

TEST_F(ArtefactTest, WhatWasDecodedSinceIsNotInIt) {
  Start();
  TestSequence first = Prompt(100, KeepRaw::kHost);
  ASSERT_TRUE(store_->steps().PrefillDone(session_->id(), first.id()).ok());
  ASSERT_TRUE(first.Append(Tokens(100, 2000)).ok());  // before the worker came
  while (Recompress(store_.get(), first.id()).ok()) {
  }
  EXPECT_EQ(first.Table().extents(), 6u);
  TestSequence second = Settled(100, KeepRaw::kHost);
  EXPECT_EQ(store_->inspection().Counters().artefact_hits, 1u);
  EXPECT_EQ(second.Table().extents(), 3u);
  second.ExpectIntact();
  ExpectClean(*store_);
}

TEST_F(ArtefactTest, EvictDropsItAndCountsIt) {
  Start();
  TestSequence first = Settled(100, KeepRaw::kNo);
  ASSERT_TRUE(first.Close().ok());
  EXPECT_EQ(store_->eviction().Evict(true).pages(), 3u);
  EXPECT_EQ(store_->eviction().Evict(true).bytes(), 6 * kPage);
  uint64_t cached = 0;
  for (const PoolInfo& pool : store_->inspection().Pools()) cached += pool.cached_bytes;
  EXPECT_EQ(cached, 6 * kPage);
  (void)store_->eviction().Evict(false);
  EXPECT_EQ(UsedBytes(*store_), 0u);
  ExpectClean(*store_);
}

// --- the audit -----------------------------------------------------------------------------------

TEST_F(ExtentsTest, TheAuditSeesWhatIsWrong) {
  Start();
  TestSequence s = Prompt(100, KeepRaw::kNo);
  ASSERT_TRUE(Recompress(store_.get(), s.id()).ok());
  Sequence& inside = AuditTestPeer::SequenceOf(*store_, s.id());
  const auto finds = [this](const std::string& part) {
    for (const std::string& finding : store_->inspection().Audit().findings) {
      if (finding.find(part) != std::string::npos) return true;
    }
    return false;
  };
  shm::ExtentEntry& entry = shm::Extents(inside.table)[1];
  ++entry.end;
  EXPECT_TRUE(finds("its table says something else"));
  --entry.end;
  entry.offset += 4096;
  EXPECT_TRUE(finds("its table names another place"));
  entry.offset -= 4096;
  shm::Entries(inside.table)[2].flags = shm::kPageSealed;
  EXPECT_TRUE(finds("was released and its table names it"));
  shm::Entries(inside.table)[2].flags = shm::kPageAbsent;
  ++inside.extents[0].page->refs;
  EXPECT_TRUE(finds("counts 2 references, 1 were found"));
  --inside.extents[0].page->refs;
  ++inside.extents[0].page->keeps;
  EXPECT_TRUE(finds("counts other holds than there are"));
  --inside.extents[0].page->keeps;
  ExpectClean(*store_);
}

// --- random use ----------------------------------------------------------------------------------

TEST_F(ExtentsTest, RandomUseKeepsEveryByteAndLeaksNothing) {
  const char* given = std::getenv("KVS_TEST_SEED");
  const unsigned seed =
      given != nullptr ? static_cast<unsigned>(std::atoi(given)) : std::random_device()();
  SCOPED_TRACE("KVS_TEST_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  Start(160, 60);
  Recompression& workers = store_->recompression();
  control_->unit = 16;
  std::vector<TestSequence> open;
  std::vector<RecompressJob> jobs;
  const KeepRaw keeps[] = {KeepRaw::kNo, KeepRaw::kHost, KeepRaw::kAuto};
  int published = 0;
  for (int step = 0; step < 1500; ++step) {
    const auto pick = [&](size_t n) { return random() % n; };
    control_->merge = pick(4) == 0;
    const size_t action = open.empty() ? 0 : pick(10);
    TestSequence* s = open.empty() ? nullptr : &open[pick(open.size())];
    if (action == 0 && open.size() < 6) {
      const std::vector<int32_t> tokens =
          Tokens(static_cast<int32_t>(1 + pick(120)), static_cast<int32_t>(1000 * pick(3)));
      Result<OpenedSequence> opened = session_->Open(pick(4) == 0 ? "full" : "window", tokens);
      if (!opened.ok()) continue;
      AuditTestPeer::SequenceOf(*store_, opened->sequence).plan.stored.keep_raw = keeps[pick(3)];
      open.emplace_back(session_.get(), *opened, tokens);
      (void)open.back().Append(std::span(tokens).subspan(opened->held_tokens));
    } else if (action <= 3 && s != nullptr) {
      // A step that finds no memory changes nothing.
      if (s->size() > 700) continue;
      TestSequence copy = *s;
      if (copy.Append(Tokens(static_cast<int32_t>(1 + pick(20)), 77 * step)).ok()) *s = copy;
    } else if (action == 4 && s != nullptr) {
      (void)store_->steps().PrefillDone(session_->id(), s->id());
    } else if (action == 5 && s != nullptr && open.size() < 8) {
      if (Result<TestSequence> child = s->Fork(); child.ok()) open.push_back(*child);
    } else if (action == 6 && s != nullptr) {
      ASSERT_TRUE(s->Close().ok());
      open.erase(open.begin() + (s - open.data()));
    } else if (action == 7 && s != nullptr) {
      (void)store_->moves().Move(s->id(), pick(2) == 0 ? Tier::kHost : Tier::kDevice);
    } else if (action == 8 && s != nullptr) {
      Result<RecompressJob> job = workers.TakeRecompression(s->id());
      if (job.ok()) jobs.push_back(std::move(*job));
    } else if (!jobs.empty()) {
      const size_t which = pick(jobs.size());
      RecompressJob job = std::move(jobs[which]);
      jobs.erase(jobs.begin() + static_cast<ptrdiff_t>(which));
      std::unique_ptr<Recompressor> next = job.recompressor ? job.recompressor->Clone() : nullptr;
      Result<RecompressOutput> ran =
          next ? next->Run(job.input) : Result<RecompressOutput>(RecompressOutput{});
      if (ran.ok()) {
        published +=
            workers.PublishRecompression(std::move(job), std::move(next), std::move(*ran)).ok();
      } else {
        workers.AbandonRecompression(std::move(job), ran.status());
      }
    }
    if (step % 10 == 0) {
      for (const TestSequence& each : open) each.ExpectIntact();
      ExpectClean(*store_);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(published, 0);
  for (RecompressJob& job : jobs) {
    workers.AbandonRecompression(std::move(job), Status(Code::kAborted, "CANCELLED", "end"));
  }
  for (TestSequence& s : open) ASSERT_TRUE(s.Close().ok());
  (void)store_->eviction().Evict(false);
  ExpectClean(*store_);
  EXPECT_EQ(UsedBytes(*store_), 0u);
}

}  // namespace
}  // namespace kvstrata
