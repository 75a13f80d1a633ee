// SPDX-License-Identifier: Apache-2.0
// RoomDriver: a ChunkRoom without sockets and threads: clients' packets go in by hand, its work is
// done when a test says so, and tiers below are a map.
//
// Every 4096 bytes of a row begin with its stamp, so that a row that others wrote to is found out.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/chunks/room/chunk_room.h"
#include "server/sockets/packet.h"

namespace kvstrata::testing {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kKiB = uint64_t{1} << 10;

inline chunks::AskedKey KeyOf(uint64_t number, uint32_t group = 0) {
  chunks::AskedKey key{{}, group};
  std::memcpy(key.hash.data(), &number, sizeof(number));
  return key;
}

template <typename Head, typename T>
std::vector<std::byte> PacketBytes(const Head& head, const std::vector<T>& list) {
  return NewPacket(0, head, std::span<const T>(list)).bytes;
}

inline std::vector<std::byte> RecalledBytes(const std::string& plan,
                                            const std::vector<chunks::RecalledLayer>& layers,
                                            const std::string& model = "m") {
  chunks::Recalled head{chunks::Type::kRecalled, static_cast<uint32_t>(layers.size()), {}, {}};
  CopyText(plan, head.plan);
  CopyText(model, head.model);
  return PacketBytes(head, layers);
}

// What one connection has been told.
struct TestClient {
  uint64_t connection = 0;
  uint32_t process = 0;
  chunks::Role role = chunks::Role::kScheduler;
  std::string engine;
  uint64_t row_bytes = 0;
  std::set<int32_t> credits;
  uint32_t recalled = 0;  // credits that it was asked for
  // By lease: ids by index, kComing until they have arrived.
  std::map<uint32_t, std::map<uint32_t, int32_t>> leases;
};

class RoomDriver {
 public:
  using Value = std::vector<std::byte>;

  explicit RoomDriver(uint64_t region_bytes, uint8_t below = kNowhere, uint8_t remote = kNowhere,
                      uint32_t layout_percent = 100) {
    ChunkRoomOptions options;
    options.layout_percent = layout_percent;
    options.bytes = region_bytes;
    options.counters = &counters;
    options.recalls = &recalls;
    options.write_shown = below;
    options.writing_bytes = 2 * kMiB;
    if (below != kNowhere || remote != kNowhere) {
      options.find = [this, remote](std::span<ChunkFind> finds) {
        for (ChunkFind& find : finds) {
          if (values.contains(find.key)) find.there = kDisk;
          find.maybe = remote;
        }
      };
    }
    Result<std::unique_ptr<ChunkRoom>> made = ChunkRoom::Make(options);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    room = std::move(made).value();
    void* at = mmap(nullptr, region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, room->fd(), 0);
    EXPECT_NE(at, MAP_FAILED);
    base_ = static_cast<std::byte*>(at);
  }
  ~RoomDriver() { munmap(base_, room->bytes()); }
  RoomDriver(const RoomDriver&) = delete;
  RoomDriver& operator=(const RoomDriver&) = delete;

  TestClient* Join(const std::string& engine, uint64_t row_bytes, uint32_t process,
                   chunks::Role role = chunks::Role::kScheduler) {
    const uint64_t connection = ++connections_;
    EXPECT_TRUE(room->Join({connection, process, role, row_bytes, engine}).ok());
    auto client = std::make_unique<TestClient>();
    *client = {connection, process, role, engine, row_bytes, {}, 0, {}};
    TestClient* const joined = client.get();
    clients[connection] = std::move(client);
    if (role == chunks::Role::kScheduler) Space(joined, 0);
    return joined;
  }
  void Leave(TestClient* client) {
    room->Leave(client->connection);
    clients.erase(client->connection);
  }

  // -- packets; each is well formed
  void Put(TestClient* client, const std::vector<std::byte>& packet) {
    const Status status = room->OnPacket(client->connection, packet);
    EXPECT_TRUE(status.ok()) << status.ToString();
    Deliver();
  }
  void Space(TestClient* client, uint8_t number) {
    chunks::Space space{chunks::Type::kSpace, 0, {}};
    space.space[0] = number;
    Put(client, PacketBytes(space, std::vector<int32_t>()));
  }
  void Want(TestClient* client, uint32_t count) {
    Put(client, PacketBytes(chunks::Counted{chunks::Type::kWant, count}, std::vector<int32_t>()));
  }
  void Ask(TestClient* client, uint32_t lease, const std::vector<chunks::AskedKey>& keys,
           uint32_t first = 0) {
    const auto count = static_cast<uint32_t>(keys.size());
    Put(client, PacketBytes(chunks::Ask{chunks::Type::kAsk, lease, first, count}, keys));
  }
  void Release(TestClient* client, uint32_t lease) {
    client->leases.erase(lease);
    Put(client,
        PacketBytes(chunks::Counted{chunks::Type::kRelease, 1}, std::vector<uint32_t>{lease}));
  }
  void Store(TestClient* client, const std::vector<chunks::StoredChunk>& stored) {
    for (const chunks::StoredChunk& chunk : stored) client->credits.erase(chunk.id);
    const auto count = static_cast<uint32_t>(stored.size());
    Put(client, PacketBytes(chunks::Counted{chunks::Type::kStored, count}, stored));
  }
  void Return(TestClient* client, int32_t id) {
    client->credits.erase(id);
    Put(client, PacketBytes(chunks::Counted{chunks::Type::kReturn, 1}, std::vector<int32_t>{id}));
  }
  // A worker's.
  void Recalled(TestClient* client, const std::string& plan,
                const std::vector<chunks::RecalledLayer>& layers) {
    Put(client, RecalledBytes(plan, layers));
  }
  // The connection is there, and says nothing any more.
  void Detach(TestClient* client) {
    client->credits.clear();
    client->leases.clear();
    Put(client, PacketBytes(chunks::Counted{chunks::Type::kDetach, 0}, std::vector<int32_t>()));
  }

  // -- bytes
  std::span<std::byte> Row(const TestClient& client, int32_t id) const {
    return {base_ + static_cast<uint64_t>(id) * client.row_bytes, client.row_bytes};
  }
  static void Write(std::span<std::byte> row, uint64_t stamp) {
    for (size_t at = 0; at < row.size(); at += 4096) {
      std::memcpy(row.data() + at, &stamp, sizeof(stamp));
    }
  }
  // Its stamp; nothing: its pages have several.
  static std::optional<uint64_t> Read(std::span<const std::byte> row) {
    uint64_t stamp = 0, other = 0;
    std::memcpy(&stamp, row.data(), sizeof(stamp));
    for (size_t at = 4096; at < row.size(); at += 4096) {
      std::memcpy(&other, row.data() + at, sizeof(other));
      if (other != stamp) return std::nullopt;
    }
    return stamp;
  }

  // -- work
  // Takes what came up; what the room says of it is delivered.
  void Deliver();
  // Does one of `work`. `fails`: a read, a write or a probe does.
  void Do(size_t at, bool fails = false);
  void DoAll() {
    for (Deliver(); !work.empty(); Deliver()) Do(0);
  }

  ChunkCounters counters;
  EngineRecalls recalls{{}};
  std::unique_ptr<ChunkRoom> room;
  std::map<uint64_t, std::unique_ptr<TestClient>> clients;  // by connection
  std::vector<ChunkWork> work;
  std::vector<ChunkDone> let_go;     // reads that failed, not told yet
  std::map<ChunkKey, Value> values;  // below

 private:
  void OnPacket(const ChunkPacket& packet);

  std::byte* base_ = nullptr;
  uint64_t connections_ = 0;
};

}  // namespace kvstrata::testing
