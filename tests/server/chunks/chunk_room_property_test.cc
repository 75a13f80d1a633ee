// SPDX-License-Identifier: Apache-2.0
// Random use of a room by engines of two row sizes, whose processes lose their sockets, detach and
// die, over a tier that fails: nobody is ever given bytes that others may write, a key gives bytes
// that were stored under it, what is leased stays as it is, and in the end nothing is leaked.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <list>
#include <random>
#include <vector>

#include "tests/server/chunks/room_counts.h"
#include "tests/server/chunks/room_driver.h"

namespace kvstrata {
namespace {

using testing::kKiB;
using testing::kMiB;
using testing::RoomDriver;
using testing::TestClient;

constexpr uint64_t kRegion = 16 * kMiB;
constexpr int kSteps = 6000;

// A row of the region, by its first byte.
struct Row {
  uint64_t row_bytes = 0;
  int32_t id = 0;
  uint64_t begin() const { return row_bytes * static_cast<uint64_t>(id); }
  uint64_t end() const { return begin() + row_bytes; }
  auto operator<=>(const Row&) const = default;
};

// What a lost scheduler had, while `awaited` live.
struct Ghost {
  std::set<uint32_t> awaited;
  std::vector<Row> credits;
  std::map<Row, uint64_t> leased;  // with its stamp
};

struct EngineModel {
  std::set<uint32_t> processes;
  int connections = 0;
  std::list<Ghost> ghosts;
};

// Beside a TestClient.
struct ClientModel {
  uint8_t space = 0;
  bool detached = false;
  std::map<uint32_t, std::map<uint32_t, ChunkKey>> asked;   // by lease and index
  std::map<uint32_t, std::map<uint32_t, uint64_t>> stamps;  // stamps of what it was given
};

class RandomRoom : public ::testing::TestWithParam<uint8_t> {
 protected:
  // In one of them rows of one size have not even half of the region.
  RandomRoom() : driver_(kRegion, kDisk, GetParam(), GetParam() == kRemote ? 40 : 100) {}

  uint64_t Below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random_); }
  bool Chance(int percent) { return Below(100) < static_cast<uint64_t>(percent); }
  TestClient* Any(bool schedulers = true) {
    std::vector<TestClient*> all;
    for (const auto& [connection, client] : driver_.clients) {
      if (models_[connection].detached) continue;
      if (!schedulers || client->role == chunks::Role::kScheduler) all.push_back(client.get());
    }
    return all.empty() ? nullptr : all[Below(all.size())];
  }
  uint64_t RowBytesOf(const std::string& engine) {
    return engine == "a" ? 256 * kKiB : engine == "b" ? 384 * kKiB : kMiB;
  }
  ChunkKey KeyOf(const TestClient& client, const chunks::AskedKey& key) {
    ChunkScope scope{0, {}, client.row_bytes};
    scope.space[0] = models_[client.connection].space;
    return ChunkKeyOf(scope, key);
  }
  chunks::AskedKey RandomKey() {
    return testing::KeyOf(Below(30), static_cast<uint32_t>(Below(2)));
  }

  void Step(uint64_t what);
  void Join();
  void Store(TestClient* client);
  void Ask(TestClient* client);
  void Lose(TestClient* client);
  void Kill();
  void Detach();
  void Work();
  void Haunt();
  void Death(uint32_t process);
  void EndIfGone(const std::string& name);
  void Check();
  void CheckRows();
  void CheckLeases(TestClient* client);
  void CheckEnd();

  std::mt19937_64 random_;
  RoomDriver driver_;
  std::map<uint64_t, ClientModel> models_;  // by connection
  std::map<std::string, EngineModel> engines_;
  std::map<ChunkKey, std::set<uint64_t>> stored_;  // stamps
  uint64_t stamps_ = 0;
  uint32_t processes_ = 0;
};

// -- what happens

void RandomRoom::Join() {
  if (driver_.clients.size() >= 7) return;
  const std::string name(1, static_cast<char>('a' + Below(3)));
  EngineModel& engine = engines_[name];
  uint32_t process = ++processes_;
  if (!engine.processes.empty() && Chance(50)) {
    process = *std::next(engine.processes.begin(),
                         static_cast<ptrdiff_t>(Below(engine.processes.size())));
  }
  const auto role = Chance(75) ? chunks::Role::kScheduler : chunks::Role::kWorker;
  driver_.Join(name, RowBytesOf(name), process, role);
  engine.processes.insert(process);
  ++engine.connections;
}

void RandomRoom::Store(TestClient* client) {
  std::vector<chunks::StoredChunk> stored;
  for (const int32_t id : client->credits) {
    if (stored.size() == 4) break;
    const chunks::AskedKey key = RandomKey();
    RoomDriver::Write(driver_.Row(*client, id), ++stamps_);
    stored_[KeyOf(*client, key)].insert(stamps_);
    stored.push_back({key, id});
  }
  if (!stored.empty()) driver_.Store(client, stored);
}

void RandomRoom::Ask(TestClient* client) {
  const auto lease = static_cast<uint32_t>(Below(6));
  std::map<uint32_t, ChunkKey>& asked = models_[client->connection].asked[lease];
  const uint32_t first = asked.empty() ? 0 : asked.rbegin()->first + 1;
  std::vector<chunks::AskedKey> keys;
  for (uint64_t n = 1 + Below(6); n > 0; --n) {
    keys.push_back(RandomKey());
    asked[first + static_cast<uint32_t>(keys.size()) - 1] = KeyOf(*client, keys.back());
  }
  driver_.Ask(client, lease, keys, first);
}

void RandomRoom::EndIfGone(const std::string& name) {
  const EngineModel& engine = engines_.at(name);
  if (engine.connections == 0 && engine.ghosts.empty()) engines_.erase(name);
}

void RandomRoom::Lose(TestClient* client) {
  CheckLeases(client);
  EngineModel& engine = engines_.at(client->engine);
  Ghost ghost{engine.processes, {}, {}};
  for (const int32_t id : client->credits) ghost.credits.push_back({client->row_bytes, id});
  for (const auto& [lease, stamps] : models_[client->connection].stamps) {
    for (const auto& [index, stamp] : stamps) {
      ghost.leased[{client->row_bytes, client->leases.at(lease).at(index)}] = stamp;
    }
  }
  const bool has = !ghost.credits.empty() || !ghost.leased.empty();
  if (has && !ghost.awaited.empty()) engine.ghosts.push_back(std::move(ghost));
  --engine.connections;
  const std::string name = client->engine;
  models_.erase(client->connection);
  driver_.Leave(client);
  EndIfGone(name);
}

void RandomRoom::Death(uint32_t process) {
  std::vector<std::string> names;
  for (auto& [name, engine] : engines_) {
    engine.processes.erase(process);
    engine.ghosts.remove_if([&](Ghost& ghost) {
      ghost.awaited.erase(process);
      return ghost.awaited.empty();
    });
    names.push_back(name);
  }
  for (const std::string& name : names) EndIfGone(name);
  driver_.room->OnDead(process);
}

void RandomRoom::Kill() {
  TestClient* const victim = Any(false);
  if (victim == nullptr) return;
  const uint32_t process = victim->process;
  std::vector<TestClient*> its;
  for (const auto& [connection, client] : driver_.clients) {
    if (client->process == process) its.push_back(client.get());
  }
  for (TestClient* client : its) Lose(client);
  Death(process);
}

void RandomRoom::Detach() {
  for (const auto& [connection, client] : driver_.clients) {
    if (models_[connection].detached) return Lose(client.get());
  }
  TestClient* const client = Any(false);
  if (client == nullptr) return;
  CheckLeases(client);
  EngineModel& engine = engines_.at(client->engine);
  ClientModel& model = models_[client->connection];
  model = {model.space, true, {}, {}};
  if (client->role == chunks::Role::kScheduler) {
    engine.ghosts.clear();
  } else {
    engine.ghosts.remove_if([&](Ghost& ghost) {
      ghost.awaited.erase(client->process);
      return ghost.awaited.empty();
    });
    const bool others = std::ranges::any_of(driver_.clients, [&](const auto& entry) {
      return !models_[entry.first].detached && entry.second->engine == client->engine &&
             entry.second->process == client->process;
    });
    if (!others) engine.processes.erase(client->process);
  }
  driver_.Detach(client);
}

void RandomRoom::Work() {
  if (!driver_.let_go.empty() && Chance(30)) {
    driver_.room->OnDone(driver_.let_go.back());
    driver_.let_go.pop_back();
    driver_.Deliver();
  }
  for (int n = 0; n < 3 && !driver_.work.empty(); ++n) {
    driver_.Do(Below(driver_.work.size()), Chance(10));
  }
}

// Processes that lost their socket write on.
void RandomRoom::Haunt() {
  for (auto& [name, engine] : engines_) {
    for (Ghost& ghost : engine.ghosts) {
      TestClient as;
      for (const Row& row : ghost.credits) {
        as.row_bytes = row.row_bytes;
        RoomDriver::Write(driver_.Row(as, row.id), ~++stamps_);
      }
    }
  }
}

void RandomRoom::Step(uint64_t what) {
  if (what < 2) return Chance(20) ? Kill() : Join();
  if (what < 3) return Chance(40) ? Detach() : Join();
  if (what < 5) return Haunt();
  if (what < 6 && !driver_.values.empty()) {
    driver_.values.erase(
        std::next(driver_.values.begin(), static_cast<ptrdiff_t>(Below(driver_.values.size()))));
  }
  if (what >= 60) return Work();
  TestClient* const client = Any();
  if (client == nullptr) return;
  if (what < 7) return Chance(30) ? Lose(client) : Join();
  if (what < 9) {
    models_[client->connection].space = static_cast<uint8_t>(Below(2));
    return driver_.Space(client, models_[client->connection].space);
  }
  if (what < 20) return driver_.Want(client, static_cast<uint32_t>(1 + Below(8)));
  if (what < 22 && !client->credits.empty()) {
    return driver_.Return(client, *client->credits.begin());
  }
  if (what < 34) return Store(client);
  if (what < 50) return Ask(client);
  const auto lease = static_cast<uint32_t>(Below(6));
  models_[client->connection].asked.erase(lease);
  models_[client->connection].stamps.erase(lease);
  driver_.Release(client, lease);
}

// -- what must hold

void RandomRoom::CheckLeases(TestClient* client) {
  ClientModel& model = models_[client->connection];
  for (const auto& [lease, ids] : client->leases) {
    for (const auto& [index, id] : ids) {
      if (id < 0) continue;
      const std::optional<uint64_t> stamp = RoomDriver::Read(driver_.Row(*client, id));
      ASSERT_TRUE(stamp) << "id " << id << " has pages of several";
      const auto [known, first] = model.stamps[lease].emplace(index, *stamp);
      ASSERT_EQ(known->second, *stamp) << "id " << id << " changed under its lease";
      ASSERT_TRUE(!first || stored_[model.asked.at(lease).at(index)].contains(*stamp));
    }
  }
}

// Whoever may write a row is alone with all of its bytes.
void RandomRoom::CheckRows() {
  std::vector<Row> credited;
  std::set<Row> leased;
  std::map<std::string, std::set<Row>> pinned;
  for (const auto& [connection, client] : driver_.clients) {
    for (const int32_t id : client->credits) credited.push_back({client->row_bytes, id});
    for (const auto& [lease, ids] : client->leases) {
      for (const auto& [index, id] : ids) {
        if (id >= 0) pinned[client->engine].insert({client->row_bytes, id});
      }
    }
  }
  for (auto& [name, engine] : engines_) {
    for (const Ghost& ghost : engine.ghosts) {
      credited.insert(credited.end(), ghost.credits.begin(), ghost.credits.end());
      for (const auto& [row, stamp] : ghost.leased) {
        pinned[name].insert(row);
        TestClient as;
        as.row_bytes = row.row_bytes;
        ASSERT_EQ(RoomDriver::Read(driver_.Row(as, row.id)), stamp);
      }
    }
  }
  for (const auto& [name, rows] : pinned) {
    uint64_t bytes = 0;
    for (const Row& row : rows) bytes += row.row_bytes;
    ASSERT_LE(bytes, kRegion / 2);
    leased.insert(rows.begin(), rows.end());
  }
  std::vector<Row> all(leased.begin(), leased.end());
  all.insert(all.end(), credited.begin(), credited.end());
  std::ranges::sort(all, {}, &Row::begin);
  for (size_t i = 1; i < all.size(); ++i) {
    ASSERT_LE(all[i - 1].end(), all[i].begin()) << all[i - 1].id << " and " << all[i].id;
  }
}

void RandomRoom::Check() {
  for (const auto& [connection, client] : driver_.clients) {
    CheckLeases(client.get());
    if (HasFatalFailure()) return;
  }
  CheckRows();
  ASSERT_EQ(driver_.counters.changed, 0u);
}

void RandomRoom::CheckEnd() {
  while (Any(false) != nullptr) Kill();
  std::vector<TestClient*> detached;
  for (const auto& [connection, client] : driver_.clients) detached.push_back(client.get());
  for (TestClient* client : detached) Lose(client);
  for (uint32_t process = 1; process <= processes_; ++process) Death(process);
  driver_.DoAll();
  for (const ChunkDone& done : driver_.let_go) driver_.room->OnDone(done);
  driver_.DoAll();
  ChunkRoomTestPeer::CheckCounts(*driver_.room);
  ASSERT_FALSE(driver_.room->in_use());
  const ChunkNumbers numbers = driver_.room->Numbers();
  EXPECT_EQ(numbers.leased.chunks, 0u);
  const uint64_t most = GetParam() == kRemote ? 6 * kMiB : kRegion;  // 40 % of 8 slabs
  for (size_t state = 0; state < kChunkStates; ++state) {
    if (state == static_cast<size_t>(ChunkState::kShown)) continue;
    EXPECT_EQ(numbers.by_state[state].chunks, 0u) << "state " << state;
  }
  for (const auto& [key, value] : driver_.values) {
    EXPECT_TRUE(stored_[key].contains(RoomDriver::Read(value).value_or(0)));
  }
  for (const std::string name : {"a", "b", "c"}) {
    TestClient* const last = driver_.Join(name, RowBytesOf(name), ++processes_);
    driver_.Want(last, 1000);
    EXPECT_EQ(last->credits.size(), most / 4 / last->row_bytes);
    driver_.Leave(last);
    driver_.room->OnDead(processes_);
  }
}

TEST_P(RandomRoom, GivesNobodyWhatOthersMayWriteAndLeaksNothing) {
  const char* const given = std::getenv("KVS_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  SCOPED_TRACE("KVS_TEST_SEED=" + std::to_string(seed));
  std::cout << "KVS_TEST_SEED=" << seed << "\n";
  random_.seed(seed);
  for (int step = 0; step < kSteps; ++step) {
    Step(Below(100));
    if (step % 100 == 0) ChunkRoomTestPeer::CheckCounts(*driver_.room);
    ASSERT_NO_FATAL_FAILURE(Check()) << "step " << step;
  }
  const ChunkCounters& c = driver_.counters;
  std::cout << c.stored << " stored, " << c.hits << " hits, " << c.arrived << " arrived, "
            << c.evicted << " evicted, " << c.read << " read, " << c.written << " written\n";
  EXPECT_GT(std::min({c.hits, c.arrived, c.evicted, c.read, c.written, c.duplicates}), 0u);
  CheckEnd();
}

INSTANTIATE_TEST_SUITE_P(Tiers, RandomRoom, ::testing::Values(kNowhere, kRemote),
                         [](const auto& tiers) {
                           return tiers.param == kRemote ? "Both" : "Disk";
                         });

}  // namespace
}  // namespace kvstrata
