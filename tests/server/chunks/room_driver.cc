// SPDX-License-Identifier: Apache-2.0
#include "tests/server/chunks/room_driver.h"

#include <algorithm>

#include "base/checksum.h"

namespace kvstrata::testing {

using chunks::kComing;
using chunks::Type;

void RoomDriver::Deliver() {
  for (const ChunkPacket& packet : room->TakePackets()) OnPacket(packet);
  for (ChunkWork& one : room->TakeWork()) work.push_back(std::move(one));
}

void RoomDriver::OnPacket(const ChunkPacket& packet) {
  const auto found = clients.find(packet.connection);
  if (found == clients.end()) return;
  TestClient* const client = found->second.get();
  Type type{};
  ASSERT_TRUE(ReadHead(packet.bytes, &type));
  if (type == Type::kCredits) {
    chunks::Counted head{};
    std::vector<int32_t> ids;
    ASSERT_TRUE(ReadList(packet.bytes, &head, &ids));
    for (const int32_t id : ids) EXPECT_TRUE(client->credits.insert(id).second);
  } else if (type == Type::kHeld) {
    chunks::Held head{};
    std::vector<int32_t> ids;
    ASSERT_TRUE(ReadList(packet.bytes, &head, &ids));
    for (size_t i = 0; i < ids.size(); ++i) {
      client->leases[head.lease][head.first + static_cast<uint32_t>(i)] = ids[i];
    }
  } else if (type == Type::kRecall) {
    chunks::Counted head{};
    ASSERT_TRUE(ReadHead(packet.bytes, &head) && packet.bytes.size() == sizeof(head));
    EXPECT_LT(head.count, client->credits.size());
    client->recalled += head.count;
  } else {
    ASSERT_EQ(type, Type::kArrived);
    chunks::Arrived head{};
    std::vector<chunks::ArrivedChunk> came;
    ASSERT_TRUE(ReadList(packet.bytes, &head, &came));
    for (const chunks::ArrivedChunk& chunk : came) {
      int32_t& id = client->leases.at(head.lease).at(chunk.index);
      EXPECT_EQ(id, kComing);
      id = chunk.id;
    }
  }
}

void RoomDriver::Do(size_t at, bool fails) {
  const ChunkWork one = work[at];
  work.erase(work.begin() + static_cast<ptrdiff_t>(at));
  ChunkDone done;
  done.kind = one.kind;
  done.chunk = one.chunk;
  done.key = one.key;
  done.below = one.below;
  done.ok = !fails;
  switch (one.kind) {
    case ChunkWork::Kind::kSum:
    case ChunkWork::Kind::kVerify:
      done.sum = ChecksumOf(one.bytes);
      break;
    case ChunkWork::Kind::kWrite:
      if (!fails) values[one.key] = Value(one.bytes.begin(), one.bytes.end());
      break;
    case ChunkWork::Kind::kProbe:
      done.below = !fails && values.contains(one.key) ? kRemote : kNowhere;
      break;
    case ChunkWork::Kind::kRead:
      done.ok = !fails && values.contains(one.key);
      if (done.ok) {
        std::ranges::copy(values.at(one.key), one.bytes.begin());
        done.sum = ChecksumOf(one.bytes);
      } else {
        let_go.push_back(done);
        let_go.back().let_go = true;
      }
      break;
  }
  room->OnDone(done);
  Deliver();
}

}  // namespace kvstrata::testing
