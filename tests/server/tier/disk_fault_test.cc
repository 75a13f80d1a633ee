// SPDX-License-Identifier: Apache-2.0
// A device that fails under the tier: errors, short transfers, requests that are never answered.
// Linked with the engine whose guards can be left out, for the one that failed flushes need.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "server/tier/breaker.h"
#include "server/tier/disk/files/tier_directory.h"
#include "server/tier/disk/format/format.h"
#include "server/tier/guard.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/tier/test_queues.h"
#include "tests/server/tier/tier_values.h"

namespace kvstrata {

Guard left_out_guard = Guard::kNone;

namespace {

using Op = IoRequest::Op;
using std::chrono::milliseconds;
constexpr uint64_t kSegment = 1 << 20;
const std::vector<uint64_t> kLarge = {150000, 3000}, kSmall = {5000};

Deadline In(int ms) { return std::chrono::steady_clock::now() + milliseconds(ms); }

// The real queue of this machine under the faults.
class DiskFault : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.directory = dir_ / "tier";
    options_.segment_bytes = kSegment;
    options_.budget_bytes = 8 * kSegment + 2 * disk::CheckpointBytes(9 * kSegment);
    options_.depth = 16;
    options_.new_queue = [this](uint32_t depth) {
      IoQueueChoice choice = NewIoQueue(depth);
      return IoQueueChoice{NewFaultyQueue(std::move(choice.queue), depth, &plan_), choice.degraded};
    };
    Open();
  }
  void TearDown() override {
    left_out_guard = Guard::kNone;
    plan_.Release();
    tier_.reset();
  }
  void Open() {
    tier_.reset();
    auto tier = DiskTier::Open(options_, Soon());
    ASSERT_TRUE(tier.ok()) << tier.status().ToString();
    tier_ = std::move(*tier);
  }
  void Fail(Op op, IoFault fault) {
    plan_.Set([=](const IoRequest& r) {
      return r.op == op ? std::optional<IoFault>(fault) : std::nullopt;
    });
  }
  Status Put(const std::string& key, const std::vector<uint64_t>& sizes,
             Deadline deadline = Soon()) {
    return PutOne(tier_.get(), key, ValueOf(key, 0, sizes), deadline);
  }
  // OK only with the right bytes.
  Status Get(const std::string& key, const std::vector<uint64_t>& sizes,
             Deadline deadline = Soon()) {
    const AlignedBuffers got(sizes);
    const Status status = GetOne(tier_.get(), key, got, deadline);
    EXPECT_TRUE(!status.ok() || SameBytes(got, ValueOf(key, 0, sizes))) << key;
    return status;
  }

  ScratchDir dir_;
  FaultPlan plan_;
  DiskTierOptions options_;
  std::unique_ptr<DiskTier> tier_;
};

TEST_F(DiskFault, ShortTransfersAreContinued) {
  for (const uint32_t bytes : {512u, 4096u, 65536u}) {
    plan_.Set([bytes](const IoRequest& r) -> std::optional<IoFault> {
      if (r.op == Op::kFlush || r.bytes <= bytes) return std::nullopt;
      return IoFault{IoFault::Kind::kShort, bytes};
    });
    const std::string key = std::to_string(bytes);
    ASSERT_TRUE(Put(key, kLarge).ok());
    ASSERT_TRUE(Get(key, kLarge).ok());
  }
}

TEST_F(DiskFault, ATransferWithoutProgressIsAnError) {
  ASSERT_TRUE(Put("a", kLarge).ok());
  Fail(Op::kRead, {IoFault::Kind::kShort, 0});
  EXPECT_EQ(Get("a", kLarge).reason(), "DISK_IO");
  EXPECT_FALSE(tier_->Contains("a"));
  Fail(Op::kWrite, {IoFault::Kind::kShort, 0});
  EXPECT_EQ(Put("b", kLarge).reason(), "DISK_IO");
  EXPECT_FALSE(tier_->Contains("b"));
}

TEST_F(DiskFault, EagainIsTriedAgainButNotForEver) {
  std::atomic<int> asked = 0;
  plan_.Set([&](const IoRequest&) -> std::optional<IoFault> {
    if (++asked % 3 != 0) return IoFault{IoFault::Kind::kFail, EAGAIN};
    return std::nullopt;
  });
  EXPECT_TRUE(Put("a", kLarge).ok());
  EXPECT_TRUE(Get("a", kLarge).ok());
  Fail(Op::kRead, {IoFault::Kind::kFail, EAGAIN});
  EXPECT_EQ(Get("a", kLarge).reason(), "DISK_IO");
}

TEST_F(DiskFault, WithoutSpaceNothingIsAdmittedAndAllIsServed) {
  ASSERT_TRUE(Put("a", kLarge).ok());
  Fail(Op::kWrite, {IoFault::Kind::kFail, ENOSPC});
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(Put("b", kSmall).reason(), "DISK_SPACE");
    EXPECT_TRUE(Get("a", kLarge).ok());
  }
  EXPECT_FALSE(tier_->Contains("b"));
  EXPECT_FALSE(tier_->Stats().breaker_open);
  plan_.Set(nullptr);
  EXPECT_TRUE(Put("b", kSmall).ok());
  EXPECT_TRUE(Get("b", kSmall).ok());
}

TEST_F(DiskFault, AHeaderGoesWithItsPayloadAndServesNothingWithoutIt) {
  ASSERT_TRUE(Put("first", kLarge).ok());  // the segment is marked dirty by now
  std::atomic<int> payloads = 0, headers = 0;
  plan_.Set([&](const IoRequest& r) -> std::optional<IoFault> {
    if (r.op != Op::kWrite) return std::nullopt;
    const auto* header = reinterpret_cast<const disk::SlotHeader*>(r.data);
    if (header->magic == disk::SlotHeader::kMagic) {
      EXPECT_EQ(payloads, 3) << "it is not the last";  // two of the first buffer
      ++headers;
      return std::nullopt;
    }
    ++payloads;
    return IoFault{IoFault::Kind::kStuck};
  });
  EXPECT_EQ(Put("a", kLarge, In(30)).reason(), "DISK_DEADLINE");
  EXPECT_EQ(headers, 1) << "it waits for the payload";
  plan_.Set(nullptr);
  DiskTierOptions next = options_;  // a daemon that was killed meanwhile: the payload never came
  std::filesystem::copy(options_.directory, dir_ / "next");
  next.directory = dir_ / "next";
  next.new_queue = NewIoQueue;
  auto tier = DiskTier::Open(next, Soon());
  ASSERT_TRUE(tier.ok()) << tier.status().ToString();
  EXPECT_TRUE((*tier)->Contains("a"));
  const AlignedBuffers got(kLarge);
  EXPECT_EQ(GetOne(tier->get(), "a", got, Soon()).reason(), "DISK_CORRUPT");
  EXPECT_FALSE((*tier)->Contains("a"));
}

// Each request of a put, an erase, a flush, a checkpoint and a get fails in turn.
TEST_F(DiskFault, EveryRequestMayFailAndNoneMisleads) {
  for (const IoFault fault :
       {IoFault{IoFault::Kind::kFail, EIO}, IoFault{IoFault::Kind::kFail, ENOSPC},
        IoFault{IoFault::Kind::kShort, 0}}) {
    for (int n = 0;; ++n) {
      plan_.Set(nullptr);
      tier_.reset();
      std::filesystem::remove_all(options_.directory);
      Open();
      ASSERT_TRUE(Put("kept", kLarge).ok());
      ASSERT_TRUE(Put("erased", kSmall).ok());
      ASSERT_TRUE(tier_->Flush(Soon()).ok());
      std::atomic<int> left = n;
      std::atomic<bool> hit = false;
      plan_.Set([&](const IoRequest&) -> std::optional<IoFault> {
        if (left-- != 0) return std::nullopt;
        hit = true;
        return fault;
      });
      const bool put = Put("new", kLarge).ok();
      const bool erased = tier_->Erase(std::vector<std::string>{"erased"}, Soon()).ok();
      const bool flushed = tier_->Flush(Soon()).ok();
      (void)tier_->Checkpoint(Soon());
      EXPECT_FALSE(tier_->Contains("erased"));
      (void)Get("kept", kLarge);
      (void)Get("new", kLarge);
      const bool kept = tier_->Contains("kept"), fresh = tier_->Contains("new");
      plan_.Set(nullptr);
      Open();
      EXPECT_TRUE(!kept || Get("kept", kLarge).ok()) << n;
      EXPECT_TRUE(!(put && flushed && fresh) || Get("new", kLarge).ok()) << n;
      EXPECT_FALSE(erased && flushed && tier_->Contains("erased")) << n;
      if (!hit) break;
    }
  }
}

TEST_F(DiskFault, AfterAFailedFlushNothingItCoveredCounts) {
  ASSERT_TRUE(Put("flushed", kSmall).ok());
  ASSERT_TRUE(tier_->Flush(Soon()).ok());
  ASSERT_TRUE(Put("lost", kSmall).ok());
  Fail(Op::kFlush, {IoFault::Kind::kFail, EIO});
  EXPECT_EQ(tier_->Flush(Soon()).reason(), "DISK_FLUSH");
  plan_.Set(nullptr);
  EXPECT_FALSE(tier_->Contains("lost"));
  EXPECT_TRUE(Get("flushed", kSmall).ok());
  EXPECT_EQ(tier_->Stats().lost_flushes, 1u);
  EXPECT_EQ(tier_->Stats().stopped_segments, 1u);
  int flushes = 0;
  plan_.Set([&](const IoRequest& r) -> std::optional<IoFault> {
    flushes += r.op == Op::kFlush;
    return std::nullopt;
  });
  EXPECT_TRUE(tier_->Flush(Soon()).ok());
  EXPECT_EQ(flushes, 0);                  // not once more
  EXPECT_TRUE(Put("lost", kSmall).ok());  // to another segment
  EXPECT_TRUE(tier_->Flush(Soon()).ok());
  EXPECT_TRUE(Get("lost", kSmall).ok());
}

TEST_F(DiskFault, ControlWithoutItsGuardAFailedFlushPassesForWritten) {
  left_out_guard = Guard::kFailedFlush;
  ASSERT_TRUE(Put("lost", kSmall).ok());
  Fail(Op::kFlush, {IoFault::Kind::kFail, EIO});
  EXPECT_TRUE(tier_->Flush(Soon()).ok());
  EXPECT_TRUE(tier_->Contains("lost"));
}

TEST_F(DiskFault, ErrorsStopASegmentThenTheDevice) {
  for (int i = 0; i < 12; ++i) ASSERT_TRUE(Put(std::to_string(i), kSmall).ok());
  Fail(Op::kRead, {IoFault::Kind::kFail, EIO});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Get(std::to_string(i), kSmall).reason(), "DISK_IO");
  EXPECT_EQ(tier_->Stats().stopped_segments, 1u);
  EXPECT_FALSE(tier_->Stats().breaker_open);
  for (int i = 4; i < 8; ++i) EXPECT_EQ(Get(std::to_string(i), kSmall).reason(), "DISK_IO");
  EXPECT_TRUE(tier_->Stats().breaker_open);
  EXPECT_EQ(Get("8", kSmall).reason(), "DISK_BREAKER");
  EXPECT_EQ(Put("x", kSmall).reason(), "DISK_BREAKER");
  EXPECT_TRUE(tier_->Contains("8"));  // nobody asked the disk
  const DiskTierStats stats = tier_->Stats();
  EXPECT_THAT(stats.last_error, testing::MatchesRegex("segment\\.[0-9]+: read 0 of [0-9]+ bytes at "
                                                      "offset [0-9]+: Input/output error"));
  EXPECT_GT(stats.last_error_time_us, 0);
  EXPECT_EQ(stats.left_alone_since_us, stats.last_error_time_us);
  EXPECT_LE(stats.retry, Breaker::kFirstPause);
}

// As of a file that somebody cut.
TEST_F(DiskFault, AnErrorNamesFileOffsetAndHowFarItCame) {
  ASSERT_TRUE(Put("a", kLarge).ok());
  EXPECT_EQ(tier_->Stats().last_error, "");
  EXPECT_EQ(tier_->Stats().left_alone_since_us, 0);
  plan_.Set([begun = false](const IoRequest& r) mutable -> std::optional<IoFault> {
    if (r.op != Op::kRead || r.bytes <= 8192) return std::nullopt;  // the header's is whole
    return IoFault{IoFault::Kind::kShort, std::exchange(begun, true) ? 0u : 4096u};
  });
  const Status why = Get("a", kLarge);
  EXPECT_EQ(why.reason(), "DISK_IO");
  EXPECT_THAT(why.message(), testing::MatchesRegex("segment\\.[0-9]+: read 4096 of [0-9]+ bytes at "
                                                   "offset [0-9]+: Input/output error"));
  EXPECT_EQ(tier_->Stats().last_error, why.message());
  plan_.Set(nullptr);
  ASSERT_TRUE(Put("b", kSmall).ok());
  Fail(Op::kFlush, {IoFault::Kind::kFail, EIO});
  EXPECT_EQ(tier_->Flush(Soon()).reason(), "DISK_FLUSH");
  EXPECT_THAT(tier_->Stats().last_error, testing::HasSubstr("fdatasync: Input/output error"));
}

TEST(DiskBreaker, OneMayTryAfterThePauseAndASuccessCloses) {
  Breaker breaker;
  Breaker::Time now{};
  for (uint32_t i = 0; i < Breaker::kFailures; ++i) {
    EXPECT_TRUE(breaker.Allow(now));
    breaker.Failed(now);
  }
  EXPECT_FALSE(breaker.Allow(now));
  now += std::chrono::seconds(1);
  EXPECT_TRUE(breaker.Allow(now));
  EXPECT_FALSE(breaker.Allow(now));  // one is enough
  breaker.Failed(now);
  now += std::chrono::seconds(1);
  EXPECT_TRUE(breaker.Allow(now));
  breaker.Failed(now);
  now += std::chrono::seconds(1);
  EXPECT_FALSE(breaker.Allow(now));  // 2 s by now
  now += std::chrono::seconds(1);
  EXPECT_TRUE(breaker.Allow(now));
  breaker.Succeeded();
  EXPECT_TRUE(breaker.Allow(now));
}

// Deadlines in these tests are waited for in full, so that a hang would show as a test's time
// limit.
TEST_F(DiskFault, AStuckRequestEndsAtItsDeadlineAndKeepsItsMemory) {
  ASSERT_TRUE(Put("a", kLarge).ok());
  ASSERT_TRUE(Put("b", kSmall).ok());
  Fail(Op::kRead, {IoFault::Kind::kStuck});
  auto buffers = std::make_unique<AlignedBuffers>(kLarge);
  const std::weak_ptr<void> memory = buffers->owner();
  EXPECT_EQ(GetOne(tier_.get(), "a", *buffers, In(30)).reason(), "DISK_DEADLINE");
  buffers.reset();
  EXPECT_FALSE(memory.expired());  // the disk may still write to it
  EXPECT_TRUE(tier_->Contains("a"));
  plan_.Set(nullptr);
  EXPECT_TRUE(Get("b", kSmall).ok());  // one that does not answer holds up no other
  EXPECT_TRUE(Put("c", kLarge).ok());
  plan_.Release();
  EXPECT_TRUE(Get("b", kSmall).ok());
  EXPECT_TRUE(memory.expired());
}

TEST_F(DiskFault, ADeviceThatStopsAnsweringOpensTheBreakerAndHoldsUpNobody) {
  std::vector<std::string> keys;
  for (int i = 0; i < 64; ++i) {
    keys.push_back(std::to_string(i));
    ASSERT_TRUE(Put(keys.back(), kSmall).ok());
  }
  plan_.Set([](const IoRequest&) { return IoFault{IoFault::Kind::kStuck}; });
  std::thread writer([&] {
    for (int i = 0; i < 5; ++i) {
      const auto value = ValueOf("w", 0, kSmall);
      TierPut put = PutOf("w" + std::to_string(i), value);
      tier_->Put({&put, 1}, In(20));
      EXPECT_FALSE(put.status.ok());
    }
    EXPECT_FALSE(tier_->Flush(In(20)).ok());
  });
  for (int i = 0; i < 12; ++i) EXPECT_FALSE(Get(keys[i], kSmall, In(20)).ok());
  writer.join();
  EXPECT_TRUE(tier_->Stats().breaker_open);
  EXPECT_EQ(tier_->Stats().entries, 64u);
  tier_.reset();  // and it ends
}

TEST_F(DiskFault, AStuckFlushIsALostOne) {
  ASSERT_TRUE(Put("a", kSmall).ok());
  Fail(Op::kFlush, {IoFault::Kind::kStuck});
  EXPECT_EQ(tier_->Flush(In(20)).reason(), "DISK_FLUSH");
  EXPECT_FALSE(tier_->Contains("a"));
}

// The real thing: a file system without room for the whole budget, 5 MB of memory or an ext4 image
// on a loop device.
class DiskSpace : public ::testing::TestWithParam<const char*> {
 protected:
  // The kernel lets a ring's files go when it pleases.
  ~DiskSpace() override { umount2(dir_.path().c_str(), MNT_DETACH); }
  bool Mount() {
    const std::string at = dir_.path();
    if (GetParam() == std::string("tmpfs")) {
      return mount("tmpfs", at.c_str(), "tmpfs", 0, "size=5m") == 0;
    }
    const std::string image = image_dir_.path() + "/image";
    return std::system(("truncate -s 16M " + image + " && mkfs.ext4 -q " + image +
                        " && mount -o loop " + image + " " + at)
                           .c_str()) == 0;
  }
  // Takes what is left of the file system.
  void Fill() {
    std::ofstream file(dir_ / "filler");
    while (file << std::string(4096, 'x') << std::flush) {
    }
  }

  ScratchDir image_dir_, dir_;
};

// What a refusal says would fit.
uint64_t FittingBytes(const Status& refused) {
  constexpr std::string_view kBefore = "lower it to ";
  const std::string message(refused.message());
  const size_t at = message.find(kBefore);
  return at == message.npos ? 0 : std::stoull(message.substr(at + kBefore.size())) << 20;
}

TEST_P(DiskSpace, ABudgetBeyondTheFileSystemIsRefusedAndTheOneThatItNamesFits) {
  if (!Mount()) GTEST_SKIP() << GetParam() << ": cannot be mounted here";
  DiskTierOptions options;
  options.directory = dir_ / "tier";
  options.segment_bytes = kSegment;
  options.budget_bytes = 20 * kSegment;
  for (const Status& refused :
       {DiskTier::CheckPlace(options), DiskTier::Open(options, Soon()).status()}) {
    EXPECT_EQ(refused.reason(), "DISK_SPACE");
    EXPECT_NE(refused.message().find("disk.budget_bytes = 20971520"), std::string::npos);
  }
  EXPECT_FALSE(std::filesystem::exists(options.directory)) << "nothing was reserved";
  options.budget_bytes = FittingBytes(DiskTier::CheckPlace(options));
  {
    auto tier = DiskTier::Open(options, Soon());
    ASSERT_TRUE(tier.ok()) << tier.status().ToString();
    EXPECT_TRUE((*tier)->Stats().degraded.ok());
    const auto space = std::filesystem::space(dir_.path());
    EXPECT_GE(space.available, space.capacity / 20) << "others have room left";
    const uint64_t segments = (*tier)->Stats().capacity_bytes / kSegment;
    EXPECT_GE(segments, 3u);
    Fill();  // by somebody else: what was reserved at the start stays ours
    uint64_t stored = 0;
    while (PutOne(tier->get(), std::to_string(stored), ValueOf("", 0, kLarge)).ok()) ++stored;
    EXPECT_EQ(stored, segments * 6);
    EXPECT_TRUE((*tier)->Flush(Soon()).ok());
    EXPECT_TRUE((*tier)->Checkpoint(Soon()).ok());
    EXPECT_TRUE(GetOne(tier->get(), "0", AlignedBuffers(kLarge)).ok());
    EXPECT_EQ((*tier)->Stats().io_errors, 0u);
  }
  {
    auto tier = DiskTier::Open(options, Soon());
    ASSERT_TRUE(tier.ok()) << tier.status().ToString();
    EXPECT_TRUE(GetOne(tier->get(), "0", AlignedBuffers(kLarge)).ok());
  }
}

TEST_P(DiskSpace, ATierThatFindsNoRoomToGrowStaysAsItIs) {
  if (!Mount()) GTEST_SKIP() << GetParam() << ": cannot be mounted here";
  DiskTierOptions options;
  options.directory = dir_ / "tier";
  options.segment_bytes = kSegment;
  options.budget_bytes = 3 * kSegment;
  auto tier = DiskTier::Open(options, Soon());
  ASSERT_TRUE(tier.ok()) << tier.status().ToString();
  const uint64_t capacity = (*tier)->Stats().capacity_bytes;
  ASSERT_TRUE(PutOne(tier->get(), "a", ValueOf("a", 0, kLarge)).ok());
  EXPECT_EQ((*tier)->Resize(60 * kSegment, Soon()).status().reason(), "DISK_SPACE");
  EXPECT_EQ((*tier)->Stats().capacity_bytes, capacity);
  EXPECT_TRUE(GetOne(tier->get(), "a", AlignedBuffers(kLarge)).ok());
  const std::string next = options.directory + "/segment." + std::to_string(capacity / kSegment);
  EXPECT_FALSE(std::filesystem::exists(next)) << "nothing was reserved";
  EXPECT_TRUE((*tier)->Resize(4 * kSegment, Soon()).ok());
  EXPECT_EQ((*tier)->Stats().capacity_bytes, capacity + kSegment);
  EXPECT_TRUE(PutOne(tier->get(), "b", ValueOf("b", 0, kLarge)).ok());
}

// Somebody else may take what the check saw.
TEST_P(DiskSpace, AFileSystemThatFillsMeanwhileGivesFewerSegmentsAndSaysSo) {
  if (!Mount()) GTEST_SKIP() << GetParam() << ": cannot be mounted here";
  const auto files = disk::OpenTierDirectory(dir_ / "tier", 20, kSegment, 65536);
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  EXPECT_EQ(files->degraded.reason(), "DISK_SPACE");
  EXPECT_GE(files->segments.size(), 4u);
  EXPECT_LT(files->segments.size(), 20u);
}

TEST_P(DiskSpace, FilesThatAFilledFileSystemKeepsFromGrowingGiveBackWhatTheyTook) {
  if (!Mount()) GTEST_SKIP() << GetParam() << ": cannot be mounted here";
  const std::string folder = dir_ / "tier";
  auto files = disk::OpenTierDirectory(folder, 2, kSegment, 65536);
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  EXPECT_EQ(disk::GrowTierDirectory(2, 60, kSegment, 65536, &*files).reason(), "DISK_SPACE");
  EXPECT_EQ(std::filesystem::file_size(folder + "/segment.2"), 0u);
}

INSTANTIATE_TEST_SUITE_P(FileSystems, DiskSpace, ::testing::Values("tmpfs", "ext4"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kvstrata
