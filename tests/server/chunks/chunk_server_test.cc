// SPDX-License-Identifier: Apache-2.0
// What hostile and unlucky clients do to the chunk server: each harms its own connection alone.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

#include "tests/server/chunks/chunk_socket.h"

namespace kvstrata {
namespace {

using chunks::Type;
using testing::ChunkScheduler;
using testing::ChunkServerFixture;
using testing::ChunkSocket;
using testing::HelloOf;
using testing::kMiB;
using testing::Packet;
using testing::PacketBytes;

class ChunkServerTest : public ChunkServerFixture {
 protected:
  Packet RandomBytes(size_t most) {
    Packet packet(1 + random_() % most);
    for (std::byte& b : packet) b = static_cast<std::byte>(random_());
    return packet;
  }
  // A packet of a client's type, whose length and numbers are often right.
  Packet RandomPacket() {
    const auto type = static_cast<Type>(random_() % 11);
    const auto count = static_cast<uint32_t>(random_() % 4 == 0 ? random_() : random_() % 5);
    const size_t sizes[] = {8,
                            152,
                            40,
                            16 + 36 * size_t{count % 2000},
                            8 + 4 * size_t{count % 2000},
                            8,
                            8 + 40 * size_t{count % 1600},
                            8 + 4 * size_t{count % 2000},
                            8,
                            256 + 20 * size_t{count % 2000},
                            8};
    Packet packet(random_() % 8 == 0 ? random_() % 65536 : sizes[static_cast<uint32_t>(type)]);
    for (std::byte& b : packet) b = static_cast<std::byte>(random_() % 3 == 0 ? random_() : 0);
    if (packet.size() >= 8) {
      std::memcpy(packet.data(), &type, sizeof(type));
      std::memcpy(packet.data() + (type == Type::kAsk ? 12 : 4), &count,
                  packet.size() >= 16 || type != Type::kAsk ? 4 : 0);
    }
    return packet;
  }

  std::mt19937_64 random_;
};

TEST_F(ChunkServerTest, RandomPacketsEndOnlyTheirConnection) {
  const char* const given = std::getenv("KVS_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  SCOPED_TRACE("KVS_TEST_SEED=" + std::to_string(seed));
  std::cout << "KVS_TEST_SEED=" << seed << "\n";
  random_.seed(seed);
  Start();
  ChunkScheduler quiet(path(), kRow, "quiet");
  quiet.Store(1);
  const int32_t held = quiet.Held(1, 1);
  for (int i = 0; i < 100; ++i) {
    ChunkSocket first(path());
    first.Send(RandomBytes(200));
    EXPECT_EQ(first.RefusedWith(), "HELLO_MALFORMED");
  }
  for (int i = 0; i < 200; ++i) {
    ChunkSocket client(path());
    chunks::Hello hello = HelloOf(kRow, "hostile");
    hello.role = i % 5 == 0 ? chunks::Role::kWorker : chunks::Role::kScheduler;
    client.SendOne(hello);
    client.SendOne(chunks::Space{Type::kSpace, 0, {}});
    for (int n = 0; n < 50; ++n) {
      if (!client.Send(RandomPacket(), MSG_DONTWAIT)) break;
    }
  }
  EXPECT_EQ(testing::RoomDriver::Read(quiet.Row(held)), 1u);
  EXPECT_EQ(quiet.Ask(2, 1), held);
  ExpectServes();
}

TEST_F(ChunkServerTest, AClientThatDoesNotReadIsEnded) {
  Start();
  ChunkScheduler other(path(), kRow, "other");
  ChunkScheduler deaf(path(), kRow, "deaf");
  const std::vector<chunks::AskedKey> keys(chunks::kMostAsked);
  const Packet ask = PacketBytes(chunks::Ask{Type::kAsk, 1, 0, chunks::kMostAsked}, keys);
  bool ended = false;
  for (int n = 0; n < 2000 && !ended; ++n) ended = !deaf.socket.Send(ask);
  EXPECT_TRUE(ended);
  EXPECT_TRUE(Eventually([&] { return server_->Numbers().connections == 1; }));
  other.Store(3);
  EXPECT_GE(other.Held(1, 3), 0);
}

TEST_F(ChunkServerTest, PacketsThatAreTooLongOrPassDescriptorsEndTheConnection) {
  Start();
  ChunkScheduler longer(path(), kRow, "long");
  EXPECT_TRUE(longer.socket.Send(Packet(70'000)));
  EXPECT_TRUE(longer.socket.Ended());
  ChunkScheduler passing(path(), kRow, "passing");
  const int fd = passing.socket.fd();
  const chunks::Counted want{Type::kWant, 1};
  EXPECT_EQ(SendPacket(fd, want, {&fd, 1}), SendOutcome::kSent);
  EXPECT_TRUE(passing.socket.Ended());
  ExpectServes();
}

TEST_F(ChunkServerTest, HelloMustComeInTime) {
  options_.door.hello_timeout = std::chrono::milliseconds(20);
  Start();
  ChunkSocket late(path());
  EXPECT_EQ(late.RefusedWith(), "HELLO_TIMEOUT");
}

TEST_F(ChunkServerTest, AUserHasSoManyConnections) {
  options_.door.connections = 2;
  Start();
  ChunkScheduler one(path(), kRow, "one");
  {
    ChunkScheduler two(path(), kRow, "two");
    ChunkSocket third(path());
    EXPECT_EQ(third.RefusedWith(), "CONNECTIONS");
  }
  EXPECT_TRUE(Eventually([&] {
    ChunkSocket again(path());
    again.SendOne(HelloOf(kRow));
    return again.RefusedWith().empty();
  }));
}

TEST_F(ChunkServerTest, OffAndRowsAreRefused) {
  options_.bytes = 0;
  Start();
  ChunkSocket off(path());
  off.SendOne(HelloOf(kRow));
  EXPECT_EQ(off.RefusedWith(), "CHUNKS_OFF");
  options_.bytes = 16 * kMiB;
  Start();
  ChunkSocket large(path());
  large.SendOne(HelloOf(4 * kMiB));
  EXPECT_EQ(large.RefusedWith(), "CHUNK_ROW");
}

// What a child process that becomes another user is answered.
std::string RefusedAs(uid_t user, const std::string& path, uint64_t row_bytes) {
  int answer[2];
  EXPECT_EQ(pipe(answer), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(user) != 0) _exit(2);
    ChunkSocket socket(path);
    socket.SendOne(HelloOf(row_bytes));
    const std::string reason = socket.RefusedWith();
    _exit(write(answer[1], reason.data(), reason.size()) < 0 ? 1 : 0);
  }
  close(answer[1]);
  char reason[64] = {};
  const ssize_t n = read(answer[0], reason, sizeof(reason));
  close(answer[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return {reason, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

TEST_F(ChunkServerTest, AnotherUserGetsTheRegionWhenNobodyIsThereAnyMore) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  chmod(directory_.path().c_str(), 0755);
  Start();
  chmod(path().c_str(), 0666);
  {
    ChunkScheduler first(path(), kRow);
    first.Store(1);
    EXPECT_GE(first.Held(1, 1), 0);
    EXPECT_EQ(RefusedAs(4711, path(), kRow), "CHUNKS_FULL");
    first.socket.SendOne(chunks::Counted{Type::kDetach, 0});
    first.socket.Close();
    EXPECT_TRUE(Eventually([&] { return server_->Numbers().connections == 0; }));
  }
  EXPECT_EQ(RefusedAs(4711, path(), kRow), "");
  EXPECT_TRUE(Eventually([&] { return server_->Numbers().user == 4711; }));
  // The other way round, and what the first user had is gone.
  EXPECT_TRUE(Eventually([&] { return server_->Numbers().connections == 0; }));
  ChunkScheduler back(path(), kRow);
  EXPECT_EQ(back.Ask(1, 1), chunks::kNotThere);
}

}  // namespace
}  // namespace kvstrata
