// SPDX-License-Identifier: Apache-2.0
// The room's rules, one at a time; chunk_room_property_test.cc has all at once.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "tests/server/chunks/room_counts.h"
#include "tests/server/chunks/room_driver.h"

namespace kvstrata {
namespace {

using chunks::kComing;
using chunks::kNotThere;
using testing::KeyOf;
using testing::kKiB;
using testing::kMiB;
using testing::RoomDriver;
using testing::TestClient;

constexpr uint64_t kRegion = 16 * kMiB;
constexpr uint64_t kRow = 256 * kKiB;
constexpr uint32_t kRows = kRegion / kRow;

// Stores `keys`, each with its number as stamp.
void StoreUnsummed(RoomDriver* driver, TestClient* client, const std::vector<uint64_t>& keys) {
  driver->Want(client, static_cast<uint32_t>(keys.size()));
  ASSERT_EQ(client->credits.size(), keys.size());
  std::vector<chunks::StoredChunk> stored;
  for (const uint64_t key : keys) {
    const int32_t id = *std::next(client->credits.begin(), static_cast<ptrdiff_t>(stored.size()));
    RoomDriver::Write(driver->Row(*client, id), key);
    stored.push_back({KeyOf(key), id});
  }
  driver->Store(client, stored);
}

// The same, and has them summed and written.
void StoreKeys(RoomDriver* driver, TestClient* client, const std::vector<uint64_t>& keys) {
  StoreUnsummed(driver, client, keys);
  driver->DoAll();
}

std::vector<chunks::AskedKey> KeysOf(const std::vector<uint64_t>& numbers) {
  std::vector<chunks::AskedKey> keys;
  for (const uint64_t number : numbers) keys.push_back(KeyOf(number));
  return keys;
}

std::vector<uint64_t> UpTo(uint64_t first, uint64_t count) {
  std::vector<uint64_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// How many of them are there. That is a use of each.
size_t Present(RoomDriver* driver, TestClient* client, const std::vector<uint64_t>& numbers) {
  size_t there = 0;
  for (const uint64_t number : numbers) {
    driver->Ask(client, 999, {KeyOf(number)});
    there += client->leases.at(999).at(0) != kNotThere;
    driver->Release(client, 999);
  }
  return there;
}

TEST(ChunkRoom, StoredIsComingUntilItsSumIsMade) {
  RoomDriver driver(kRegion);
  TestClient* const client = driver.Join("e", kRow, 1);
  driver.Want(client, 1);
  const int32_t id = *client->credits.begin();
  RoomDriver::Write(driver.Row(*client, id), 7);
  driver.Ask(client, 1, {KeyOf(1)});
  EXPECT_EQ(client->leases.at(1).at(0), kNotThere);
  driver.Store(client, {{KeyOf(1), id}});
  driver.Ask(client, 2, {KeyOf(2), KeyOf(1)});
  EXPECT_EQ(client->leases.at(2).at(0), kNotThere);
  EXPECT_EQ(client->leases.at(2).at(1), kComing);
  driver.DoAll();
  EXPECT_EQ(client->leases.at(2).at(1), id);
  EXPECT_EQ(driver.counters.arrived, 1u);
}

TEST(ChunkRoom, TheEndOfAPromptGoesFirst) {
  RoomDriver driver(kRegion);
  TestClient* const client = driver.Join("e", kRow, 1);
  for (uint64_t at = 0; at < kRows; at += 16) StoreKeys(&driver, client, UpTo(at, 16));
  // The 16 oldest are used last of all; what is stored takes the place of the others, then of
  // theirs.
  driver.Ask(client, 1, KeysOf(UpTo(0, 16)));
  driver.Release(client, 1);
  for (uint64_t at = 100; at < 100 + kRows - 16; at += 16) StoreKeys(&driver, client, UpTo(at, 16));
  StoreKeys(&driver, client, UpTo(500, 8));
  EXPECT_EQ(driver.counters.evicted, kRows - 16 + 8);
  EXPECT_EQ(Present(&driver, client, UpTo(0, 8)), 8u);
  EXPECT_EQ(Present(&driver, client, UpTo(8, 8)), 0u);
}

TEST(ChunkRoom, AWholeSlabGoesToRowsOfAnotherSizeWhenItIsOldest) {
  RoomDriver driver(kRegion);
  TestClient* const small = driver.Join("small", kRow, 1);
  for (uint64_t at = 0; at < kRows; at += 16) StoreKeys(&driver, small, UpTo(at, 16));
  TestClient* const large = driver.Join("large", kMiB, 2);
  StoreKeys(&driver, large, {1, 2});
  ChunkRoomTestPeer::CheckCounts(*driver.room);
  const size_t left = Present(&driver, small, UpTo(0, kRows));
  EXPECT_EQ(left, kRows - 8);                          // one slab of 2 MiB
  EXPECT_EQ(Present(&driver, small, UpTo(8, 8)), 0u);  // the first packet's end
  EXPECT_EQ(Present(&driver, large, {1, 2}), 2u);
}

TEST(ChunkRoom, SlabsThatAreLeasedInPartStay) {
  RoomDriver driver(kRegion);
  TestClient* const small = driver.Join("small", kRow, 1);
  for (uint64_t at = 0; at < kRows; at += 16) StoreKeys(&driver, small, UpTo(at, 16));
  std::vector<uint64_t> of_each_slab;
  for (uint64_t n = 0; n < kRows; n += 8) of_each_slab.push_back(n);
  driver.Ask(small, 1, KeysOf(of_each_slab));
  TestClient* const large = driver.Join("large", kMiB, 2);
  driver.Want(large, 1);
  EXPECT_TRUE(large->credits.empty());
  driver.Release(small, 1);
  EXPECT_EQ(large->credits.size(), 1u);
}

TEST(ChunkRoom, RowsAcrossSlabsOfOneSizeAreUsed) {
  RoomDriver driver(kRegion);
  constexpr uint64_t kOdd = 12 * 128 * kKiB;  // slabs of 2 MiB hold one whole each, and parts
  TestClient* const client = driver.Join("e", kOdd, 1);
  size_t stored = 0;
  for (uint64_t n = 0; n < kRegion / kOdd; ++n) {
    StoreKeys(&driver, client, {n});
    stored = Present(&driver, client, UpTo(0, n + 1));
  }
  EXPECT_EQ(stored, kRegion / kOdd);
  EXPECT_EQ(driver.counters.evicted, 0u);
}

TEST(ChunkRoom, CreditsAreGivenInTurnAsRoomComes) {
  RoomDriver driver(kRegion);
  TestClient* const clients[] = {driver.Join("a", kRow, 1), driver.Join("b", kRow, 2),
                                 driver.Join("c", kRow, 3), driver.Join("d", kRow, 4),
                                 driver.Join("e", kRow, 5), driver.Join("f", kRow, 6)};
  for (int i = 0; i < 4; ++i) driver.Want(clients[i], kRows);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(clients[i]->credits.size(), kRows / 4);
  driver.Want(clients[4], 2);
  driver.Want(clients[5], 2);
  EXPECT_TRUE(clients[4]->credits.empty());
  clients[0]->credits.clear();
  driver.Detach(clients[0]);
  EXPECT_EQ(clients[4]->credits.size(), 2u);
  EXPECT_EQ(clients[5]->credits.size(), 2u);
}

TEST(ChunkRoom, CreditsThatNobodyUsesAreRecalledWhenWhatIsYoungerGivesWay) {
  RoomDriver driver(kRegion);
  TestClient* const idle = driver.Join("idle", kRow, 1);
  TestClient* const busy = driver.Join("busy", kRow, 2);
  driver.Want(idle, kRows / 4);
  uint64_t at = 0;
  for (; at < 3 * kRows / 4; at += 8) StoreKeys(&driver, busy, UpTo(at, 8));
  EXPECT_EQ(driver.counters.evicted, 0u);
  EXPECT_EQ(idle->recalled, 0u);
  // Its credits are older than the oldest chunk.
  StoreKeys(&driver, busy, UpTo(at, 8));
  EXPECT_EQ(idle->recalled, kRows / 4 - 1);
  EXPECT_EQ(busy->recalled, 0u);
  for (uint32_t n = 0; n < idle->recalled; ++n) driver.Return(idle, *idle->credits.begin());
  for (at += 8; at < 4 * kRows; at += 8) StoreKeys(&driver, busy, UpTo(at, 8));
  EXPECT_EQ(idle->recalled, kRows / 4 - 1);  // once
  EXPECT_EQ(Present(&driver, busy, UpTo(0, at)), kRows - 1);
  // It wants again, and is as young as others.
  driver.Want(idle, kRows / 4 - 1);
  EXPECT_EQ(idle->credits.size(), kRows / 4);
  StoreKeys(&driver, busy, UpTo(at, 8));
  EXPECT_EQ(idle->recalled, kRows / 4 - 1);
  ChunkRoomTestPeer::CheckCounts(*driver.room);
}

TEST(ChunkRoom, WhoIsStarvedHasOthersGiveBackWhatTheyDoNotUse) {
  RoomDriver driver(kRegion);
  std::vector<TestClient*> idle;
  for (uint32_t n = 0; n < 4; ++n) {
    idle.push_back(driver.Join("idle" + std::to_string(n), kRow, n + 1));
    driver.Want(idle.back(), kRows / 4);
  }
  TestClient* const busy = driver.Join("busy", kRow, 9);
  driver.Want(busy, 8);
  EXPECT_TRUE(busy->credits.empty());
  for (TestClient* client : idle) EXPECT_EQ(client->recalled, kRows / 4 - 1);
  driver.Return(idle[2], *idle[2]->credits.begin());
  EXPECT_EQ(busy->credits.size(), 1u);
  EXPECT_EQ(busy->recalled, 0u);
}

TEST(ChunkRoom, ALayoutTakesItsShareAndNoMore) {
  RoomDriver driver(kRegion, kNowhere, kNowhere, 50);
  TestClient* const small = driver.Join("small", kRow, 1);
  TestClient* const large = driver.Join("large", kMiB, 2);
  StoreKeys(&driver, large, {1, 2});
  for (uint64_t at = 0; at < 2 * kRows; at += 8) StoreKeys(&driver, small, UpTo(at, 8));
  EXPECT_EQ(Present(&driver, large, {1, 2}), 2u);
  EXPECT_EQ(Present(&driver, small, UpTo(kRows + kRows / 2, kRows / 2)), kRows / 2);
  EXPECT_EQ(Present(&driver, small, UpTo(0, kRows + kRows / 2)), 0u);
  // Half of its share is leased, a quarter of it credited.
  driver.Ask(small, 1, KeysOf(UpTo(kRows + kRows / 2, kRows / 2)));
  EXPECT_EQ(driver.room->Numbers().leased.chunks, kRows / 4);
  driver.Want(small, kRows);
  EXPECT_EQ(small->credits.size(), kRows / 8);
  ChunkRoomTestPeer::CheckCounts(*driver.room);
}

TEST(ChunkRoom, AShareOfOneSlabHasARowWhateverItsSize) {
  for (const uint64_t row : {kRow, 12 * 128 * kKiB, 2 * kMiB}) {
    RoomDriver driver(kRegion, kNowhere, kNowhere, 1);
    TestClient* const large = driver.Join("large", kMiB, 1);  // has the first slab
    StoreKeys(&driver, large, {1});
    TestClient* const client = driver.Join("e", row, 2);
    for (uint64_t n = 0; n < 20; ++n) StoreKeys(&driver, client, {n});
    EXPECT_EQ(Present(&driver, client, {19}), 1u) << row;
    EXPECT_EQ(Present(&driver, large, {1}), 1u) << row;
  }
}

TEST(ChunkRoom, AListHasAllThatIsShownOnceHoweverItIsCut) {
  RoomDriver driver(kRegion);
  constexpr uint64_t kOdd = 12 * 128 * kKiB;  // rows that lie across slabs, too
  TestClient* const small = driver.Join("small", kRow, 1);
  TestClient* const large = driver.Join("large", kOdd, 2);
  StoreKeys(&driver, small, UpTo(0, 5));
  StoreKeys(&driver, large, {1, 2});
  StoreKeys(&driver, large, {3});
  StoreKeys(&driver, small, UpTo(5, 16));
  driver.Want(small, 3);  // what is credited is nobody's yet
  for (size_t n = 1; n < 30; ++n) {
    std::map<uint64_t, size_t> listed;  // by row size
    std::set<ChunkKey> keys;
    for (uint64_t at = 0; at < kRegion;) {
      for (const ShownChunk& chunk : driver.room->List(&at, n)) {
        ++listed[chunk.bytes.size()];
        EXPECT_TRUE(keys.insert(chunk.key).second);
        EXPECT_EQ(driver.room->Shown(chunk.key)->bytes.data(), chunk.bytes.data());
      }
    }
    EXPECT_EQ(listed[kRow], 21u);
    EXPECT_EQ(listed[kOdd], 3u);
  }
  EXPECT_FALSE(driver.room->Shown(ChunkKey{}).has_value());
}

TEST(ChunkRoom, ABytesChangedAfterStoreReachesNoTierAndNobody) {
  RoomDriver driver(kRegion, kDisk);
  TestClient* const client = driver.Join("e", kRow, 1);
  driver.Want(client, 1);
  const int32_t id = *client->credits.begin();
  RoomDriver::Write(driver.Row(*client, id), 1);
  driver.Store(client, {{KeyOf(1), id}});
  driver.Do(0);  // its sum
  driver.Ask(client, 1, {KeyOf(1)});
  EXPECT_EQ(client->leases.at(1).at(0), id);
  RoomDriver::Write(driver.Row(*client, id), 2);
  driver.DoAll();
  EXPECT_EQ(driver.counters.changed, 1u);
  EXPECT_TRUE(driver.values.empty());
  EXPECT_EQ(Present(&driver, client, {1}), 0u);
  // It is leased still, so nobody else may write there.
  driver.Want(client, kRows);
  EXPECT_FALSE(client->credits.contains(id));
  driver.Release(client, 1);
  ChunkRoomTestPeer::CheckCounts(*driver.room);
  const ChunkNumbers numbers = driver.room->Numbers();
  EXPECT_EQ(numbers.by_state[static_cast<size_t>(ChunkState::kDropped)].chunks, 0u);
}

TEST(ChunkRoom, AChunkIsUnwrittenUntilItsTierHasIt) {
  RoomDriver driver(kRegion, kDisk);
  TestClient* const client = driver.Join("e", kRow, 1);
  StoreUnsummed(&driver, client, UpTo(1, 16));  // more than are written at once
  for (int done = 0; !driver.work.empty(); ++done) {
    const ChunkAmount left = driver.room->Unwritten();
    EXPECT_EQ(left.chunks + driver.counters.written, 16u);
    EXPECT_EQ(left.bytes, left.chunks * kRow);
    EXPECT_TRUE(driver.room->saves());
    if (done == 10) driver.Leave(client);
    driver.Do(0);
  }
  EXPECT_EQ(driver.room->Unwritten().chunks, 0u);
  EXPECT_FALSE(driver.room->saves());
  EXPECT_EQ(driver.counters.written, 16u);
}

TEST(ChunkRoom, WhatNoTierIsToGetIsNotUnwritten) {
  RoomDriver driver(kRegion);
  StoreUnsummed(&driver, driver.Join("e", kRow, 1), {1, 2});
  EXPECT_EQ(driver.room->Numbers().of(ChunkState::kSumming).chunks, 2u);
  EXPECT_EQ(driver.room->Unwritten().chunks, 0u);
  EXPECT_FALSE(driver.room->saves());
}

TEST(ChunkRoom, OneReadServesAllThatWaitAndSuchAsLeaveMeanwhile) {
  RoomDriver driver(kRegion, kDisk);
  TestClient* const one = driver.Join("a", kRow, 1);
  TestClient* const two = driver.Join("b", kRow, 2);
  StoreKeys(&driver, one, {1});
  for (uint64_t at = 100; at < 100 + kRows; at += 16) StoreKeys(&driver, one, UpTo(at, 16));
  driver.Ask(one, 1, {KeyOf(1)});
  driver.Ask(two, 5, {KeyOf(1), KeyOf(1)});
  driver.Ask(two, 6, {KeyOf(1)});
  ASSERT_EQ(driver.work.size(), 1u);
  EXPECT_EQ(driver.work.front().kind, ChunkWork::Kind::kRead);
  driver.Release(two, 6);
  driver.DoAll();
  const int32_t id = one->leases.at(1).at(0);
  ASSERT_GE(id, 0);
  EXPECT_EQ(two->leases.at(5).at(0), id);
  EXPECT_EQ(two->leases.at(5).at(1), id);
  EXPECT_EQ(RoomDriver::Read(driver.Row(*one, id)), 1u);
  EXPECT_EQ(driver.counters.read, 1u);
  EXPECT_EQ(driver.counters.written, 1u + kRows);
}

TEST(ChunkRoom, AReadThatFailsIsAMissAndItsRoomIsFreeWhenTheTierLetsGo) {
  RoomDriver driver(kRegion, kDisk);
  TestClient* const client = driver.Join("e", kRow, 1);
  StoreKeys(&driver, client, {1});
  for (uint64_t at = 100; at < 100 + kRows; at += 16) StoreKeys(&driver, client, UpTo(at, 16));
  driver.Ask(client, 1, {KeyOf(1)});
  ASSERT_EQ(client->leases.at(1).at(0), kComing);
  driver.Do(0, true);
  EXPECT_EQ(client->leases.at(1).at(0), kNotThere);
  const auto reading = [&driver] {
    return driver.room->Numbers().by_state[static_cast<size_t>(ChunkState::kReading)].chunks;
  };
  EXPECT_EQ(reading(), 1u);
  driver.room->OnDone(driver.let_go.front());
  EXPECT_EQ(reading(), 0u);
  ChunkRoomTestPeer::CheckCounts(*driver.room);
}

TEST(ChunkRoom, WhatIsOnlyElsewhereIsAskedForAndRead) {
  RoomDriver driver(kRegion, kDisk, kRemote);
  TestClient* const client = driver.Join("e", kRow, 1);
  driver.Ask(client, 1, {KeyOf(1)});
  EXPECT_EQ(client->leases.at(1).at(0), kComing);
  driver.DoAll();
  EXPECT_EQ(client->leases.at(1).at(0), kNotThere);
  driver.Ask(client, 2, {KeyOf(1)});
  const ChunkKey key = driver.work.front().key;
  driver.values[key] = RoomDriver::Value(kRow, std::byte{3});
  driver.DoAll();
  ASSERT_GE(client->leases.at(2).at(0), 0);
  EXPECT_EQ(driver.Row(*client, client->leases.at(2).at(0))[5], std::byte{3});
}

TEST(ChunkRoom, StoredWhileElsewhereIsAskedCountsAtOnce) {
  RoomDriver driver(kRegion, kNowhere, kRemote);
  TestClient* const client = driver.Join("e", kRow, 1);
  driver.Ask(client, 1, {KeyOf(1)});
  driver.Want(client, 1);
  const int32_t id = *client->credits.begin();
  driver.Store(client, {{KeyOf(1), id}});
  driver.DoAll();
  EXPECT_EQ(client->leases.at(1).at(0), id);
}

TEST(ChunkRoom, WhatASchedulerHadRestsForAllProcessesOfItsEngine) {
  RoomDriver driver(kRegion);
  TestClient* const scheduler = driver.Join("e", kRow, 1);
  TestClient* const worker = driver.Join("e", kRow, 2, chunks::Role::kWorker);
  driver.Want(scheduler, 3);
  driver.Leave(scheduler);
  const auto credited = [&driver] {
    return driver.room->Numbers().by_state[static_cast<size_t>(ChunkState::kCredited)].chunks;
  };
  driver.room->OnDead(1);
  EXPECT_EQ(credited(), 3u);
  // A new engine of that name does not keep them.
  TestClient* const restarted = driver.Join("e", kRow, 3);
  driver.Leave(worker);
  EXPECT_EQ(credited(), 3u);
  driver.room->OnDead(2);
  EXPECT_EQ(credited(), 0u);
  driver.Leave(restarted);
  driver.room->OnDead(3);
  EXPECT_FALSE(driver.room->in_use());
}

TEST(ChunkRoom, DetachEndsTheRest) {
  RoomDriver driver(kRegion);
  TestClient* const lost = driver.Join("e", kRow, 1);
  driver.Want(lost, 3);
  driver.Leave(lost);
  TestClient* const back = driver.Join("e", kRow, 1);
  EXPECT_EQ(driver.room->Numbers().resting, 1u);
  driver.Detach(back);
  EXPECT_EQ(driver.room->Numbers().resting, 0u);
  EXPECT_FALSE(driver.room->OnPacket(back->connection, std::vector<std::byte>(8)).ok());
}

TEST(ChunkRoom, WhatWorkersTellIsTheirEngines) {
  RoomDriver driver(kRegion);
  TestClient* const scheduler = driver.Join("e", kRow, 1);
  TestClient* const ranks[] = {driver.Join("e", kRow, 2, chunks::Role::kWorker),
                               driver.Join("e", kRow, 3, chunks::Role::kWorker)};
  TestClient* const other = driver.Join("o", kRow, 4, chunks::Role::kWorker);
  driver.Recalled(ranks[0], "quest", {{0, 1, 0.5F, 0.5F, 0}});
  driver.Recalled(ranks[1], "quest", {{0, 1, 1, 1, 0}});
  driver.Recalled(other, "bits", {{3, 1, 1, 1, 0}});
  ASSERT_EQ(driver.recalls.Engines().size(), 2u);
  EXPECT_EQ(driver.recalls.Engines()[0].layers[0].samples, 2u);
  EXPECT_EQ(driver.recalls.Engines()[0].layers[0].recall, 0.75);
  // Until all of it is gone.
  for (TestClient* rank : ranks) driver.Leave(rank);
  EXPECT_EQ(driver.recalls.Engines().size(), 2u);
  driver.Leave(scheduler);
  ASSERT_EQ(driver.recalls.Engines().size(), 1u);
  EXPECT_EQ(driver.recalls.Engines()[0].engine, "o");
}

TEST(ChunkRoom, MalformedPacketsSayWhatIsWrong) {
  RoomDriver driver(kRegion);
  TestClient* const client = driver.Join("e", kRow, 1);
  TestClient* const worker = driver.Join("e", kRow, 1, chunks::Role::kWorker);
  driver.Want(client, 1);
  const int32_t other = *client->credits.begin() + 1;
  const auto why = [&](TestClient* who, const std::vector<std::byte>& packet) {
    const Status status = driver.room->OnPacket(who->connection, packet);
    EXPECT_EQ(status.reason(), "CHUNK_PACKET");
    return status.message();
  };
  using chunks::Type;
  using testing::PacketBytes;
  const std::vector<int32_t> none;
  EXPECT_NE(why(client, {}).find("type"), std::string::npos);
  EXPECT_NE(why(client, PacketBytes(chunks::Counted{Type::kReturn, 2}, none)).find("count"),
            std::string::npos);
  EXPECT_NE(why(client, PacketBytes(chunks::Counted{Type::kReturn, 1}, std::vector{other}))
                .find(std::to_string(other)),
            std::string::npos);
  const std::vector<chunks::StoredChunk> stored{{KeyOf(1), other}};
  EXPECT_NE(why(client, PacketBytes(chunks::Counted{Type::kStored, 1}, stored)).find("credit"),
            std::string::npos);
  const std::vector<chunks::AskedKey> keys(1);
  const chunks::Ask far{Type::kAsk, 1, chunks::kMostLeased, 1};
  EXPECT_NE(why(client, PacketBytes(far, keys)).find("1048576"), std::string::npos);
  EXPECT_NE(why(worker, PacketBytes(chunks::Counted{Type::kWant, 1}, none)).find("worker"),
            std::string::npos);
  EXPECT_NE(why(client, PacketBytes(chunks::Counted{Type::kWelcome, 1}, none)).find("101"),
            std::string::npos);
  const auto recalled = testing::RecalledBytes("quest", {{0, 1, 1, 1, 0}});
  EXPECT_NE(why(client, recalled).find("scheduler"), std::string::npos);
  EXPECT_NE(why(worker, std::vector(recalled.begin(), recalled.end() - 1)).find("275 bytes"),
            std::string::npos);
  EXPECT_TRUE(driver.recalls.Engines().empty());
}

}  // namespace
}  // namespace kvstrata
