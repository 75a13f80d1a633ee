// SPDX-License-Identifier: Apache-2.0
// The smallest client of the attach socket, for tests: dials, says Hello, maps the segments, speaks
// through the rings. Every wait has a deadline; a broken expectation is a gtest failure or, in a
// child process, a false or empty answer.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "proto/attach_messages.h"
#include "proto/ring.h"
#include "proto/ring_messages.h"
#include "proto/shm_layout.h"
#include "proto/table_reader.h"

namespace kvstrata::test {

using Bytes = std::vector<std::byte>;
inline constexpr int kDeadlineMs = 20'000;

// Waits until `condition` holds; false after the deadline.
template <typename F>
bool Eventually(const F& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDeadlineMs);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

template <typename T>
void Put(Bytes* out, const T& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  out->insert(out->end(), begin, begin + sizeof(value));
}
template <typename T>
Bytes PodBytes(const T& value) {
  Bytes out;
  Put(&out, value);
  return out;
}
inline void PutTokens(Bytes* out, const std::vector<int32_t>& tokens) {
  for (const int32_t t : tokens) Put(out, t);
}

inline UniqueFd Dial(const std::string& path, int type = SOCK_SEQPACKET) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return UniqueFd();
  }
  return fd;
}

struct Packet {
  Bytes bytes;  // empty: EOF, or the deadline passed
  std::vector<UniqueFd> fds;
  uint32_t type() const {
    uint32_t t = 0;
    if (bytes.size() >= sizeof(t)) std::memcpy(&t, bytes.data(), sizeof(t));
    return t;
  }
  template <typename T>
  T As() const {
    T out{};
    std::memcpy(&out, bytes.data(), std::min(bytes.size(), sizeof(T)));
    return out;
  }
};

inline Packet Receive(int fd) {
  Packet packet;
  pollfd readable{fd, POLLIN, 0};
  if (poll(&readable, 1, kDeadlineMs) != 1) return packet;
  packet.bytes.resize(4096);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) char control[256];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  packet.bytes.resize(n > 0 ? n : 0);
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); n > 0 && c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int passed;
      std::memcpy(&passed, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      packet.fds.emplace_back(passed);
    }
  }
  return packet;
}

inline bool SawEof(int fd) {
  pollfd hangup{fd, POLLRDHUP, 0};
  return poll(&hangup, 1, kDeadlineMs) == 1;
}

inline shm::Hello GoodHello(const char* name = "test") {
  shm::Hello hello{};
  hello.type = shm::kHello;
  hello.magic = shm::kMagic;
  hello.version = shm::kVersion;
  std::strncpy(hello.client_name, name, sizeof(hello.client_name) - 1);
  return hello;
}

// A model of 1 layer and 1 head: pages of 16 tokens and 4 KiB.
inline shm::RegisterModel SmallModel() {
  shm::RegisterModel model{};
  std::strcpy(model.name, "small");
  std::strcpy(model.digest, "digest");
  model.layers = model.query_heads = model.kv_heads = 1;
  model.head_dim = 64;
  model.page_tokens = 16;
  model.dtype = 3;
  model.ranks = 1;
  return model;
}

struct Reply {
  bool received = false;
  shm::FrameHeader header{};
  shm::ErrorReply error{};
  Bytes payload;
  bool ok() const { return received && error.code == 0; }
  template <typename T>
  T As() const {
    T out{};
    std::memcpy(&out, payload.data(), std::min(payload.size(), sizeof(T)));
    return out;
  }
};

class Client {
 public:
  // Attached, or nothing.
  static std::optional<Client> Attach(const std::string& path, const char* name = "test") {
    Client c;
    c.socket_ = Dial(path);
    const shm::Hello hello = GoodHello(name);
    if (!c.socket_ || send(c.socket_.get(), &hello, sizeof(hello), MSG_NOSIGNAL) < 0) return {};
    Packet packet = Receive(c.socket_.get());
    if (packet.type() != shm::kWelcome || packet.fds.size() != 3) return {};
    c.welcome_ = packet.As<shm::Welcome>();
    c.session_fd_ = std::move(packet.fds[0]);
    c.table_fd_ = std::move(packet.fds[1]);
    c.doorbell_ = std::move(packet.fds[2]);
    if (!c.Map()) return {};
    return c;
  }
  Client(Client&& other) noexcept { *this = std::move(other); }
  Client& operator=(Client&& other) noexcept {
    Unmap();
    socket_ = std::move(other.socket_);
    session_fd_ = std::move(other.session_fd_);
    table_fd_ = std::move(other.table_fd_);
    doorbell_ = std::move(other.doorbell_);
    welcome_ = other.welcome_;
    base_ = std::exchange(other.base_, nullptr);
    tables_ = std::exchange(other.tables_, nullptr);
    requests_ = other.requests_;
    replies_ = other.replies_;
    next_id_ = other.next_id_;
    return *this;
  }
  ~Client() { Unmap(); }

  bool Send(uint32_t type, uint64_t id, const Bytes& payload) {
    if (!requests_.Push(type, id, {payload})) return false;
    Ring();
    return true;
  }
  void Ring() {
    const uint64_t one = 1;
    if (requests_.ConsumerSleeps()) (void)!write(doorbell_.get(), &one, sizeof(one));
  }
  Reply Read() {
    Reply reply;
    Bytes bytes;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kDeadlineMs);
    for (;;) {
      const auto outcome = replies_.Pop(&reply.header, &bytes);
      if (outcome == shm::RingConsumer::Outcome::kFrame) break;
      if (outcome == shm::RingConsumer::Outcome::kCorrupt) return reply;
      if (std::chrono::steady_clock::now() > end) return reply;
      replies_.PrepareSleep();
      if (replies_.Empty()) {
        replies_.FutexWait(100'000);
      } else {
        replies_.CancelSleep();
      }
      pollfd hangup{socket_.get(), POLLRDHUP, 0};
      if (replies_.Empty() && poll(&hangup, 1, 0) == 1 && replies_.Empty()) return reply;
    }
    if (bytes.size() < sizeof(reply.error)) return reply;
    std::memcpy(&reply.error, bytes.data(), sizeof(reply.error));
    reply.payload.assign(bytes.begin() + sizeof(reply.error), bytes.end());
    reply.received = reply.payload.size() == reply.error.payload_bytes;
    return reply;
  }
  Reply Call(uint32_t type, const Bytes& payload = {}) {
    const uint64_t id = next_id_++;
    if (!Send(type, id, payload)) return {};
    Reply reply = Read();
    reply.received = reply.received && reply.header.id == id;
    return reply;
  }

  uint64_t Register(const shm::RegisterModel& model = SmallModel()) {
    return Call(shm::kRegisterModel, PodBytes(model)).As<shm::ModelReply>().model;
  }
  Reply Open(uint64_t model, const std::string& plan, const std::vector<int32_t>& tokens,
             uint32_t flags = 0) {
    Bytes payload =
        PodBytes(shm::OpenSequence{model, static_cast<uint32_t>((plan.size() + 3) & ~3u),
                                   static_cast<uint32_t>(tokens.size()), 0, flags});
    for (size_t i = 0; i < ((plan.size() + 3) & ~size_t{3}); ++i) {
      payload.push_back(static_cast<std::byte>(i < plan.size() ? plan[i] : 0));
    }
    PutTokens(&payload, tokens);
    return Call(shm::kOpenSequence, payload);
  }
  bool Commit(uint64_t sequence, uint32_t first, const std::vector<int32_t>& tokens,
              uint32_t indexed = 0, uint32_t flags = 0) {
    Bytes payload = PodBytes(
        shm::Commit{sequence, first, static_cast<uint32_t>(tokens.size()), indexed, flags});
    PutTokens(&payload, tokens);
    return Send(shm::kCommit, 0, payload);
  }
  Reply Settle(uint64_t sequence) {
    return Call(shm::kSettle, PodBytes(shm::SequenceRef{sequence}));
  }

  void HangUp() { socket_.Reset(); }
  int socket() const { return socket_.get(); }
  int session_fd() const { return session_fd_.get(); }
  int table_fd() const { return table_fd_.get(); }
  const shm::Welcome& welcome() const { return welcome_; }
  shm::SessionHeader* header() { return reinterpret_cast<shm::SessionHeader*>(base_); }
  std::byte* base() { return base_; }
  shm::TableReader tables() {
    return {header(), reinterpret_cast<const shm::TableHeader*>(tables_), welcome_.table_bytes};
  }

 private:
  Client() = default;
  bool Map() {
    void* base = mmap(nullptr, welcome_.session_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                      session_fd_.get(), 0);
    void* tables = mmap(nullptr, welcome_.table_bytes, PROT_READ, MAP_SHARED, table_fd_.get(), 0);
    if (base == MAP_FAILED || tables == MAP_FAILED) return false;
    base_ = static_cast<std::byte*>(base);
    tables_ = static_cast<std::byte*>(tables);
    requests_ = {&header()->request, base_ + header()->request_ring_offset, shm::kRequestRingBytes};
    replies_ = {&header()->reply, base_ + header()->reply_ring_offset, shm::kReplyRingBytes};
    return true;
  }
  void Unmap() {
    if (base_ != nullptr) munmap(base_, welcome_.session_bytes);
    if (tables_ != nullptr) munmap(tables_, welcome_.table_bytes);
    base_ = tables_ = nullptr;
  }

  UniqueFd socket_, session_fd_, table_fd_, doorbell_;
  shm::Welcome welcome_{};
  std::byte* base_ = nullptr;
  std::byte* tables_ = nullptr;
  shm::RingProducer requests_;
  shm::RingConsumer replies_;
  uint64_t next_id_ = 1;
};

inline std::vector<int32_t> Tokens(int n, int32_t first = 1) {
  std::vector<int32_t> out(n);
  for (int i = 0; i < n; ++i) out[i] = first + i;
  return out;
}

}  // namespace kvstrata::test
