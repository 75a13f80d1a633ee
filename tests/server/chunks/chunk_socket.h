// SPDX-License-Identifier: Apache-2.0
// A chunk server over small memory, and the smallest client of it, for tests. Every wait has a
// deadline; what does not come is an empty packet.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "server/chunks/chunk_server.h"
#include "tests/fakes/scratch_dir.h"
#include "tests/server/chunks/room_driver.h"

namespace kvstrata::testing {

inline constexpr int kDeadlineMs = 20'000;
using Packet = std::vector<std::byte>;

inline chunks::Hello HelloOf(uint64_t row_bytes, const std::string& engine = "engine") {
  chunks::Hello hello{};
  hello.type = chunks::Type::kHello;
  hello.magic = chunks::kMagic;
  hello.version = chunks::kVersion;
  hello.row_bytes = row_bytes;
  CopyText(engine, hello.engine);
  CopyText("test", hello.client_name);
  return hello;
}

class ChunkSocket {
 public:
  explicit ChunkSocket(const std::string& path) : fd_(socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }

  int fd() const { return fd_.get(); }
  void Close() { fd_.Reset(); }
  bool Send(std::span<const std::byte> packet, int flags = 0) {
    return send(fd_.get(), packet.data(), packet.size(), MSG_NOSIGNAL | flags) ==
           static_cast<ssize_t>(packet.size());
  }
  template <typename T>
  bool SendOne(const T& packet) {
    return Send(std::as_bytes(std::span(&packet, 1)));
  }
  // Empty: the connection has ended, or nothing came in time. A descriptor beside it is mapped.
  Packet Receive() {
    pollfd readable{fd_.get(), POLLIN, 0};
    if (poll(&readable, 1, kDeadlineMs) != 1) return {};
    Packet packet(65536);
    iovec part{packet.data(), packet.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t n = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    packet.resize(n > 0 ? static_cast<size_t>(n) : 0);
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
      int region = -1;
      std::memcpy(&region, CMSG_DATA(header), sizeof(region));
      region_.Reset(region);
    }
    return packet;
  }
  // Until it has ended; false: it has not in time.
  bool Ended() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDeadlineMs);
    while (!Receive().empty()) {
      if (std::chrono::steady_clock::now() > until) return false;
    }
    pollfd hangup{fd_.get(), POLLIN | POLLRDHUP, 0};
    return poll(&hangup, 1, 0) == 1 && (hangup.revents & (POLLRDHUP | POLLHUP)) != 0;
  }
  // The reason of a Refused; "": it is something else.
  std::string RefusedWith() {
    chunks::Refused refused{};
    const Packet packet = Receive();
    if (!ReadHead(packet, &refused) || refused.type != chunks::Type::kRefused) return "";
    return refused.reason;
  }
  int region() const { return region_.get(); }

 private:
  UniqueFd fd_, region_;
};

// A scheduler that is welcome, with space 0.
class ChunkScheduler {
 public:
  ChunkScheduler(const std::string& path, uint64_t row_bytes, const std::string& engine = "engine")
      : socket(path), row_bytes_(row_bytes) {
    EXPECT_TRUE(socket.SendOne(HelloOf(row_bytes, engine)));
    chunks::Welcome welcome{};
    EXPECT_TRUE(ReadHead(socket.Receive(), &welcome));
    EXPECT_EQ(welcome.type, chunks::Type::kWelcome);
    bytes_ = welcome.region_bytes;
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, socket.region(), 0);
    EXPECT_NE(at, MAP_FAILED);
    base_ = static_cast<std::byte*>(at);
    EXPECT_TRUE(socket.SendOne(chunks::Space{chunks::Type::kSpace, 0, {}}));
  }
  ~ChunkScheduler() { munmap(base_, bytes_); }
  ChunkScheduler(const ChunkScheduler&) = delete;
  ChunkScheduler& operator=(const ChunkScheduler&) = delete;

  std::span<std::byte> Row(int32_t id) const {
    return {base_ + static_cast<uint64_t>(id) * row_bytes_, row_bytes_};
  }
  // `count` from `number` on, each with its number as stamp, so many in one packet.
  void Store(uint64_t number, uint32_t count = 1) { StoreBy(count, number, count); }
  void StoreBy(uint32_t packet, uint64_t number, uint32_t count) {
    socket.SendOne(chunks::Counted{chunks::Type::kWant, count});
    chunks::Counted head{};
    std::vector<int32_t> ids;
    ASSERT_TRUE(ReadList(socket.Receive(), &head, &ids) && ids.size() == count);
    std::vector<chunks::StoredChunk> stored;
    for (const int32_t id : ids) {
      RoomDriver::Write(Row(id), number);
      stored.push_back({KeyOf(number++), id});
    }
    for (size_t at = 0; at < stored.size(); at += packet) {
      socket.Send(PacketBytes(chunks::Counted{chunks::Type::kStored, packet},
                              std::vector(stored.begin() + static_cast<ptrdiff_t>(at),
                                          stored.begin() + static_cast<ptrdiff_t>(at + packet))));
    }
  }
  int32_t Ask(uint32_t lease, uint64_t number) {
    const std::vector<chunks::AskedKey> keys{KeyOf(number)};
    socket.Send(PacketBytes(chunks::Ask{chunks::Type::kAsk, lease, 0, 1}, keys));
    chunks::Held head{};
    std::vector<int32_t> ids;
    EXPECT_TRUE(ReadList(socket.Receive(), &head, &ids) && head.type == chunks::Type::kHeld);
    return ids.empty() ? chunks::kNotThere : ids.front();
  }
  void Release(uint32_t lease) {
    socket.Send(
        PacketBytes(chunks::Counted{chunks::Type::kRelease, 1}, std::vector<uint32_t>{lease}));
  }
  // The next that arrives, of whichever lease.
  int32_t Arrived() {
    chunks::Arrived head{};
    std::vector<chunks::ArrivedChunk> came;
    const Packet packet = socket.Receive();
    EXPECT_TRUE(ReadList(packet, &head, &came) && head.type == chunks::Type::kArrived);
    return came.empty() ? chunks::kNotThere : came.front().id;
  }
  int32_t Held(uint32_t lease, uint64_t number) {
    const int32_t id = Ask(lease, number);
    return id == chunks::kComing ? Arrived() : id;
  }

  ChunkSocket socket;

 private:
  const uint64_t row_bytes_;
  uint64_t bytes_ = 0;
  std::byte* base_ = nullptr;
};

class ChunkServerFixture : public ::testing::Test {
 protected:
  static constexpr uint64_t kRow = 64 * kKiB;

  ChunkServerFixture() {
    options_.bytes = 16 * kMiB;
    options_.recalls = &recalls_;
  }
  void Start() {
    server_.reset();
    auto listener = UnixListener::Listen(path(), SOCK_SEQPACKET, -1);
    ASSERT_TRUE(listener.ok()) << listener.status().ToString();
    // As on a kernel before 6.16, which cannot refuse descriptors.
    LetPassDescriptors((*listener)->fd(), true);
    auto server = ChunkServer::Start(options_, std::move(listener).value());
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(server).value();
  }
  std::string path() const { return directory_ / "k.sock.chunks"; }
  // Whether it serves.
  void ExpectServes() {
    ChunkScheduler client(path(), kRow, "serves");
    client.Store(4711);
    const int32_t id = client.Held(1, 4711);
    ASSERT_GE(id, 0);
    EXPECT_EQ(RoomDriver::Read(client.Row(id)), 4711u);
  }
  template <typename F>
  static bool Eventually(const F& condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDeadlineMs);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > until) return false;
      poll(nullptr, 0, 1);
    }
    return true;
  }

  ScratchDir directory_{::testing::TempDir()};
  EngineRecalls recalls_{{}};
  ChunkServerOptions options_;
  std::unique_ptr<ChunkServer> server_;
};

}  // namespace kvstrata::testing
