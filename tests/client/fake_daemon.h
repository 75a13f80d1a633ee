// SPDX-License-Identifier: Apache-2.0
// FakeDaemon: the daemon's end of one attach socket and its rings, driven by a test line by line,
// so that every way a daemon can misbehave can be played. One connection; the test's thread only.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "proto/attach_messages.h"
#include "proto/ring.h"
#include "proto/ring_messages.h"
#include "proto/shm_layout.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::client::testing {

inline UniqueFd SealedMemfd(uint64_t bytes, int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) {
  UniqueFd fd(memfd_create("kvs-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  if (seals != 0) {
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

class FakeDaemon {
 public:
  explicit FakeDaemon(const std::string& path) : listener_(socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string attach = path + ".attach";
    std::memcpy(address.sun_path, attach.data(), attach.size());
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_.get(), 4), 0);
    const uint64_t rings = sizeof(shm::SessionHeader);
    session_bytes_ =
        rings + shm::kRequestRingBytes + shm::kReplyRingBytes + shm::kAccessCounters * 4;
    session_ = SealedMemfd(session_bytes_);
    table_ = SealedMemfd(kTableBytes);
    doorbell_.Reset(eventfd(0, EFD_NONBLOCK));
    header_ = static_cast<shm::SessionHeader*>(Map(session_, session_bytes_));
    tables_ = static_cast<shm::TableHeader*>(Map(table_, kTableBytes));
    header_->magic = tables_->magic = shm::kMagic;
    header_->version = tables_->version = shm::kVersion;
    header_->request_ring_offset = rings;
    header_->reply_ring_offset = rings + shm::kRequestRingBytes;
    header_->access_counters_offset = rings + shm::kRequestRingBytes + shm::kReplyRingBytes;
    requests_ = {&header_->request, Base() + header_->request_ring_offset, shm::kRequestRingBytes};
    replies_ = {&header_->reply, Base() + header_->reply_ring_offset, shm::kReplyRingBytes};
    welcome_.type = shm::kWelcome;
    welcome_.version = shm::kVersion;
    welcome_.session_bytes = session_bytes_;
    welcome_.table_bytes = kTableBytes;
  }
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;
  ~FakeDaemon() {
    munmap(header_, session_bytes_);
    munmap(tables_, kTableBytes);
  }

  shm::Welcome& welcome() { return welcome_; }
  shm::SessionHeader* header() { return header_; }
  shm::TableHeader* tables() { return tables_; }
  void ReplaceSession(UniqueFd fd) { session_ = std::move(fd); }

  // Accepts, reads the Hello.
  shm::Hello Accept() {
    peer_.Reset(accept(listener_.get(), nullptr, nullptr));
    shm::Hello hello{};
    EXPECT_EQ(recv(peer_.get(), &hello, sizeof(hello), 0), static_cast<ssize_t>(sizeof(hello)));
    return hello;
  }
  // Accepts, and leaves the Hello unread.
  void AcceptUnheard() { peer_.Reset(accept(listener_.get(), nullptr, nullptr)); }
  void Welcome() { Send(welcome_, {session_.get(), table_.get(), doorbell_.get()}); }
  void HangUp() { peer_.Reset(); }

  template <typename T>
  void Send(const T& packet, std::vector<int> fds) {
    iovec part{const_cast<T*>(&packet), sizeof(packet)};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
    }
    EXPECT_GT(sendmsg(peer_.get(), &message, MSG_NOSIGNAL), 0);
  }

  // Waits for the next frame of the client.
  shm::FrameHeader Take(std::vector<std::byte>* payload = nullptr) {
    shm::FrameHeader frame{};
    std::vector<std::byte> unused;
    while (requests_.Pop(&frame, payload == nullptr ? &unused : payload) ==
           shm::RingConsumer::Outcome::kEmpty) {
      sched_yield();
    }
    return frame;
  }
  template <typename T>
  void Reply(uint64_t id, const T& payload, Code code = Code::kOk) {
    shm::ErrorReply reply{};
    reply.code = static_cast<int32_t>(code);
    std::strcpy(reply.reason, code == Code::kOk ? "" : "FAKE_REASON");
    std::strcpy(reply.message, code == Code::kOk ? "" : "what the daemon said");
    EXPECT_TRUE(replies_.Push(
        shm::kReply, id,
        {std::as_bytes(std::span(&reply, 1)), std::as_bytes(std::span(&payload, 1))}));
    if (replies_.ConsumerSleeps()) replies_.FutexWake();
  }

 private:
  static constexpr uint64_t kTableBytes = sizeof(shm::TableHeader) + (1 << 16);

  static void* Map(const UniqueFd& fd, uint64_t bytes) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  }
  std::byte* Base() { return reinterpret_cast<std::byte*>(header_); }

  UniqueFd listener_, peer_, session_, table_, doorbell_;
  uint64_t session_bytes_ = 0;
  shm::SessionHeader* header_ = nullptr;
  shm::TableHeader* tables_ = nullptr;
  shm::RingConsumer requests_;
  shm::RingProducer replies_;
  shm::Welcome welcome_{};
};

}  // namespace kvstrata::client::testing
