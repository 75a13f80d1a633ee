// SPDX-License-Identifier: Apache-2.0
// Chunks over tiers: what memory has not is read once, what a tier has damaged is a miss, and a
// server that starts anew serves what its tiers have.
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <vector>

#include "tests/fakes/memory_value_tier.h"
#include "tests/server/chunks/chunk_socket.h"

namespace kvstrata {
namespace {

using chunks::kComing;
using chunks::kNotThere;
using testing::ChunkScheduler;
using testing::ChunkServerFixture;
using testing::kMiB;
using testing::MemoryValueTier;
using testing::RoomDriver;

class ChunkTiersTest : public ChunkServerFixture {
 protected:
  void TearDown() override { server_.reset(); }

  void StartOver(ValueTier* disk, ValueTier* remote, uint8_t shown, uint8_t reused = kNowhere) {
    options_.tiers.disk = disk;
    options_.tiers.remote = remote;
    options_.tiers.write_shown = shown;
    options_.tiers.write_reused = reused;
    Start();
  }
  bool Written(uint64_t chunks) {
    return Eventually([&] { return server_->Numbers().counters.written >= chunks; });
  }
  static std::string NameOf(uint64_t number) {
    const ChunkScope scope{static_cast<uint32_t>(geteuid()), {}, kRow};
    return TierKeyOf(ChunkKeyOf(scope, testing::KeyOf(number)));
  }
  static void ExpectStamp(const ChunkScheduler& client, int32_t id, uint64_t stamp) {
    ASSERT_GE(id, 0);
    EXPECT_EQ(RoomDriver::Read(client.Row(id)), stamp);
  }

  MemoryValueTier disk_{64 * kMiB}, remote_{64 * kMiB};
};

TEST_F(ChunkTiersTest, AServerThatStartsAnewServesWhatItsDiskHas) {
  StartOver(&disk_, nullptr, kDisk);
  {
    ChunkScheduler client(path(), kRow);
    for (uint64_t n = 1; n <= 40; ++n) client.Store(n);
    EXPECT_TRUE(Written(40));
  }
  Start();
  ChunkScheduler client(path(), kRow);
  for (uint64_t n = 1; n <= 40; ++n) ExpectStamp(client, client.Held(1, n), n);
  EXPECT_EQ(client.Ask(2, 41), kNotThere);
  EXPECT_EQ(server_->Numbers().counters.read, 40u);
  EXPECT_EQ(disk_.Stats().puts, 40u);  // what came from there is not written again
}

TEST_F(ChunkTiersTest, WhatWasSentBeforeTheEndIsWritten) {
  StartOver(&disk_, nullptr, kDisk);
  disk_.Hold();
  ChunkScheduler client(path(), kRow);
  client.StoreBy(1, 1, 64);  // more packets than it reads in one go
  server_->EndServing();
  EXPECT_TRUE(client.socket.Ended());
  EXPECT_EQ(server_->Unwritten().chunks, 64u);
  EXPECT_EQ(server_->Unwritten().bytes, 64 * kRow);
  EXPECT_TRUE(server_->Saves());
  disk_.Release();
  EXPECT_TRUE(Eventually([&] { return !server_->Saves(); }));
  EXPECT_EQ(server_->Unwritten().chunks, 0u);
  EXPECT_EQ(disk_.Stats().puts, 64u);
}

TEST_F(ChunkTiersTest, AStopWaitsForNoTierThatHangs) {
  StartOver(&disk_, nullptr, kDisk);
  disk_.Hold();
  ChunkScheduler client(path(), kRow);
  client.Store(1);
  server_->Stop();
  EXPECT_TRUE(client.socket.Ended());
  EXPECT_EQ(server_->Unwritten().chunks, 1u);
  disk_.Release();
}

TEST_F(ChunkTiersTest, DamagedBytesAreAMissAndMayBeStoredAgain) {
  StartOver(&disk_, nullptr, kDisk);
  {
    ChunkScheduler client(path(), kRow);
    client.Store(1);
    EXPECT_TRUE(Written(1));
  }
  Start();
  disk_.Damage(NameOf(1));
  ChunkScheduler client(path(), kRow);
  EXPECT_EQ(client.Ask(1, 1), kComing);
  EXPECT_EQ(client.Arrived(), kNotThere);
  EXPECT_EQ(client.Ask(2, 1), kNotThere);
  client.Store(1);
  ExpectStamp(client, client.Held(3, 1), 1);
}

TEST_F(ChunkTiersTest, OneReadHoweverManyWantIt) {
  StartOver(&disk_, nullptr, kDisk);
  {
    ChunkScheduler client(path(), kRow);
    client.Store(1);
    EXPECT_TRUE(Written(1));
  }
  Start();
  disk_.Hold();
  ChunkScheduler one(path(), kRow, "one"), two(path(), kRow, "two");
  EXPECT_EQ(one.Ask(1, 1), kComing);
  EXPECT_EQ(one.Ask(2, 1), kComing);
  EXPECT_EQ(two.Ask(1, 1), kComing);
  disk_.Release();
  const int32_t id = one.Arrived();
  ExpectStamp(one, id, 1);
  EXPECT_EQ(one.Arrived(), id);
  EXPECT_EQ(two.Arrived(), id);
  EXPECT_EQ(disk_.Stats().hits, 1u);
}

TEST_F(ChunkTiersTest, ATierThatHangsKeepsNobody) {
  StartOver(&disk_, nullptr, kDisk);
  {
    ChunkScheduler client(path(), kRow);
    client.Store(1);
    EXPECT_TRUE(Written(1));
  }
  Start();
  disk_.Hold();
  ChunkScheduler client(path(), kRow);
  EXPECT_EQ(client.Ask(1, 1), kComing);
  EXPECT_EQ(client.Ask(2, 3), kNotThere);
  client.Store(2);
  EXPECT_TRUE(Eventually([&] {
    return server_->Numbers().by_state[static_cast<size_t>(ChunkState::kShown)].chunks == 1;
  }));
  ExpectStamp(client, client.Ask(3, 2), 2);
  disk_.Release();
  ExpectStamp(client, client.Arrived(), 1);
}

TEST_F(ChunkTiersTest, RemoteServesWhatTheDiskHasNotOrHasDamaged) {
  StartOver(&disk_, &remote_, kDisk | kRemote);
  {
    ChunkScheduler client(path(), kRow);
    client.Store(1);
    client.Store(2);
    EXPECT_TRUE(Written(2));
  }
  MemoryValueTier empty{64 * kMiB};
  StartOver(&empty, &remote_, kDisk | kRemote);
  {
    ChunkScheduler client(path(), kRow);
    ExpectStamp(client, client.Held(1, 1), 1);
    EXPECT_EQ(client.Ask(2, 3), kComing);  // the remote tier must be asked
    EXPECT_EQ(client.Arrived(), kNotThere);
    EXPECT_TRUE(Eventually([&] { return empty.Stats().puts == 1; }));
  }
  StartOver(&disk_, &remote_, kDisk | kRemote);
  disk_.Damage(NameOf(2));
  ChunkScheduler client(path(), kRow);
  ExpectStamp(client, client.Held(1, 2), 2);
  server_.reset();  // before `empty`
}

TEST_F(ChunkTiersTest, ReusedChunksGoToATierOfReused) {
  StartOver(&disk_, &remote_, kDisk, kRemote);
  ChunkScheduler client(path(), kRow);
  client.Store(1);
  EXPECT_TRUE(Written(1));
  EXPECT_EQ(remote_.Stats().puts, 0u);
  ExpectStamp(client, client.Ask(1, 1), 1);
  EXPECT_TRUE(Eventually([&] { return remote_.Stats().puts == 1; }));
  EXPECT_EQ(disk_.Stats().puts, 1u);
}

// Calls that read wait here until the test answers them.
class AnsweredTier final : public ValueTier {
 public:
  struct Read {
    std::span<TierGet> gets;
    TierCall call;
  };
  void Get(std::span<TierGet> gets, TierCall call) override {
    reads.push_back({gets, std::move(call)});
  }
  void Probe(std::span<TierProbe>, TierCall call) override { call.done(); }
  void Put(std::span<TierPut>, TierCall call) override { call.done(); }
  void Forget(std::span<TierForget>, TierCall call) override { call.done(); }
  void Walk(TierWalk*, TierCall call) override { call.done(); }
  TierStats Stats() const override { return {}; }

  void AnswerFirst(const Status& status) {
    const Read read = std::move(reads.front());
    reads.pop_front();
    for (TierGet& get : read.gets) get.status = status;
    read.call.done();
  }
  std::deque<Read> reads;
};

class ChunkReadsTest : public ::testing::Test {
 protected:
  static constexpr int kCalls = 20;
  ChunkReadsTest() {
    ChunkTiersOptions options;
    options.disk = &disk_;
    options.read_bytes = kRow;  // a call reads one chunk
    options.read_timeout = kTimeout;
    tiers_ = std::make_unique<ChunkTiers>(options, inbox_);
    std::vector<ChunkWork> work(kCalls);
    for (int i = 0; i < kCalls; ++i) {
      work[i].kind = ChunkWork::Kind::kRead;
      work[i].below = kDisk;
      work[i].chunk.id = i;
      work[i].bytes = std::span(row_);
    }
    tiers_->Start(std::move(work));
  }
  // The chunks that were read, or were not, since the last time.
  std::vector<int32_t> Done(bool ok) {
    std::vector<int32_t> ids;
    for (const ChunkDone& done : inbox_->TakeAll()) {
      if (!done.let_go && done.ok == ok) ids.push_back(done.chunk.id);
    }
    return ids;
  }

  static constexpr uint64_t kRow = 4096;
  static constexpr std::chrono::seconds kTimeout{1000};
  std::array<std::byte, kRow> row_{};
  AnsweredTier disk_;
  std::shared_ptr<ChunkInbox> inbox_ = std::make_shared<ChunkInbox>([] {});
  std::unique_ptr<ChunkTiers> tiers_;
};

TEST_F(ChunkReadsTest, ADeadlineIsFromWhenTheTurnCame) {
  ASSERT_LT(disk_.reads.size(), size_t{kCalls});
  for (int i = 0; i < kCalls; ++i) {
    ASSERT_FALSE(disk_.reads.empty());
    const size_t before = disk_.reads.size();
    const auto now = std::chrono::steady_clock::now();
    disk_.AnswerFirst(OkStatus());
    EXPECT_EQ(Done(true), std::vector<int32_t>{i});
    if (disk_.reads.size() < before) continue;  // none waits any more
    EXPECT_GE(disk_.reads.back().call.deadline, now + kTimeout);
  }
  EXPECT_TRUE(disk_.reads.empty());
}

TEST_F(ChunkReadsTest, WhatWaitsBehindACallThatIsLateIsLateToo) {
  const size_t begun = disk_.reads.size();
  disk_.AnswerFirst(TierLate());
  std::vector<int32_t> late{0};
  for (size_t i = begun; i < kCalls; ++i) late.push_back(static_cast<int32_t>(i));
  EXPECT_EQ(Done(false), late);
  while (!disk_.reads.empty()) disk_.AnswerFirst(OkStatus());
  EXPECT_EQ(Done(true).size(), begun - 1);
}

TEST_F(ChunkReadsTest, NothingBeginsBehindTheEnd) {
  const size_t begun = disk_.reads.size();
  tiers_.reset();
  for (size_t i = 0; i < begun; ++i) disk_.AnswerFirst(OkStatus());
  EXPECT_TRUE(disk_.reads.empty());
}

}  // namespace
}  // namespace kvstrata
