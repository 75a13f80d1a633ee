// SPDX-License-Identifier: Apache-2.0
// Chunks over tiers: what memory has not is read once, what a tier has damaged is a miss, and a
// server that starts anew serves what its tiers have.
#include <gtest/gtest.h>

#include <memory>

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

TEST_F(ChunkTiersTest, AStopWritesWhatIsCompleteAndWaitsForNoTierThatHangs) {
  StartOver(&disk_, nullptr, kDisk);
  {
    ChunkScheduler client(path(), kRow);
    client.Store(1, 64);
    ASSERT_EQ(client.Ask(1, 1000), kNotThere);  // it has seen them all, and summed hardly one
    server_->Stop(std::chrono::seconds(20));
    EXPECT_TRUE(client.socket.Ended());
  }
  EXPECT_EQ(disk_.Stats().puts, 64u);
  Start();
  disk_.Hold();
  ChunkScheduler client(path(), kRow);
  client.Store(1000);
  ASSERT_EQ(client.Ask(1, 2000), kNotThere);
  server_->Stop(std::chrono::milliseconds(20));
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

}  // namespace
}  // namespace kvstrata
