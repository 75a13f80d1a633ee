// SPDX-License-Identifier: Apache-2.0
#include "client/linked/attach.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "client/daemon_socket.h"

namespace kvstrata::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxFds = 3;
constexpr size_t kMaxPacket = 1024;
static_assert(sizeof(shm::Refused) <= kMaxPacket && sizeof(shm::Welcome) <= kMaxPacket);

struct Packet {
  alignas(8) std::byte data[kMaxPacket];
  ssize_t bytes = 0;  // 0: end of file; negative: -errno
  UniqueFd fds[kMaxFds];
  int fd_count = 0;

  uint32_t type() const {
    uint32_t type = 0;
    if (bytes >= 4) std::memcpy(&type, data, sizeof(type));
    return type;
  }
};

void Receive(int socket, int flags, Packet* packet) {
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  iovec part{packet->data, sizeof(packet->data)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  do {
    packet->bytes = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  } while (packet->bytes < 0 && errno == EINTR);
  if (packet->bytes < 0) packet->bytes = -errno;
  packet->fd_count = 0;
  if (packet->bytes <= 0) return;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
      UniqueFd owned(fd);
      if (packet->fd_count < kMaxFds) packet->fds[packet->fd_count++] = std::move(owned);
    }
  }
}

// At least 1 ms: a socket waits for ever with a timeout of 0.
std::chrono::microseconds Left(Clock::time_point deadline) {
  return std::max(std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()),
                  std::chrono::microseconds(1000));
}

template <size_t N>
void CopyText(char (&to)[N], const std::string& from) {
  const size_t n = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

Status RefusalOf(const Packet& packet) {
  shm::Refused refused{};
  std::memcpy(&refused, packet.data, std::min(sizeof(refused), static_cast<size_t>(packet.bytes)));
  const Code code = CodeName(static_cast<Code>(refused.code)) == "UNKNOWN" || refused.code == 0
                        ? Code::kInternal
                        : static_cast<Code>(refused.code);
  return {code, TextOf(refused.reason), TextOf(refused.message)};
}

}  // namespace

Result<std::unique_ptr<Connection>> Connection::Dial(const std::string& path,
                                                     const std::string& device_uuid,
                                                     const std::string& client_name,
                                                     std::chrono::milliseconds timeout,
                                                     PageMap* arenas) {
  const auto deadline = Clock::now() + timeout;
  std::unique_ptr<Connection> connection(new Connection(arenas));
  KVS_ASSIGN_OR_RETURN(connection->socket_,
                       ConnectToDaemon(path, ".attach", SOCK_SEQPACKET, Left(deadline)));
  shm::Hello hello{};
  hello.type = shm::kHello;
  hello.magic = shm::kMagic;
  hello.version = shm::kVersion;
  CopyText(hello.device_uuid, device_uuid);
  CopyText(hello.client_name, client_name);
  KVS_RETURN_IF_ERROR(connection->Handshake(hello, deadline));
  KVS_RETURN_IF_ERROR(connection->VerifySegments());
  return connection;
}

Status Connection::Handshake(const shm::Hello& hello, Clock::time_point deadline) {
  const int fd = socket_.get();
  const bool sent = send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello);
  // The daemon may refuse a connection before it is spoken to, and hang up: why lies in our socket.
  if (!sent && errno != EPIPE && errno != ECONNRESET) {
    return Unavailable("DAEMON_UNREACHABLE", std::string("saying hello: ") + std::strerror(errno));
  }
  SetSocketTimeout(fd, SO_RCVTIMEO, Left(deadline));
  Packet packet;
  Receive(fd, 0, &packet);
  // The kernel says once that the hello was not read, and only then what was sent before the end.
  if (packet.bytes == -ECONNRESET) Receive(fd, 0, &packet);
  if (packet.bytes == -EAGAIN) {
    return {Code::kDeadlineExceeded, "DEADLINE",
            "the daemon did not answer the hello in time; raise timeout_ms or look at its log"};
  }
  if (packet.bytes <= 0) {
    return Unavailable("DAEMON_GONE", "the daemon closed the connection before its welcome");
  }
  if (packet.type() == shm::kRefused) return RefusalOf(packet);
  return TakeWelcome(packet.data, static_cast<size_t>(packet.bytes), packet.fds, packet.fd_count);
}

Status Connection::TakeWelcome(const std::byte* packet, size_t bytes, UniqueFd (&fds)[kMaxFds],
                               int fd_count) {
  if (bytes < 8) return Unavailable("PROTOCOL", "the daemon's welcome has 8 bytes or less");
  std::memcpy(&welcome_, packet, std::min(bytes, sizeof(welcome_)));
  if (welcome_.type != shm::kWelcome) {
    return Unavailable("PROTOCOL", "the daemon's first packet is of type " +
                                       std::to_string(welcome_.type) + ", not a welcome");
  }
  if (welcome_.version != shm::kVersion) {
    return FailedPrecondition("VERSION_MISMATCH",
                              "the daemon speaks version " + std::to_string(welcome_.version) +
                                  ", this library version " + std::to_string(shm::kVersion) +
                                  "; install the same release of both");
  }
  if (bytes != sizeof(welcome_) || fd_count != kMaxFds) {
    return Unavailable("PROTOCOL", "the daemon's welcome has " + std::to_string(bytes) +
                                       " bytes and " + std::to_string(fd_count) + " descriptors");
  }
  KVS_ASSIGN_OR_RETURN(
      session_, Mapping::Of(fds[0].get(), welcome_.session_bytes, true, "the session segment"));
  KVS_ASSIGN_OR_RETURN(table_,
                       Mapping::Of(fds[1].get(), welcome_.table_bytes, false, "the table segment"));
  doorbell_ = std::move(fds[2]);
  return OkStatus();
}

Status Connection::VerifySegments() const {
  const auto bad = [](const std::string& why) {
    return Status(Code::kDataLoss, "SEGMENT_INVALID", "the daemon's segments: " + why);
  };
  if (session_bytes() < sizeof(shm::SessionHeader) || table_bytes() < sizeof(shm::TableHeader)) {
    return bad("shorter than their headers");
  }
  const shm::SessionHeader& s = *session();
  const shm::TableHeader& t = *tables();
  if (s.magic != shm::kMagic || t.magic != shm::kMagic) return bad("no kvstrata segment (magic)");
  if (s.version != shm::kVersion || t.version != shm::kVersion) {
    return FailedPrecondition("VERSION_MISMATCH", "the segments are of another version");
  }
  const auto inside = [&](uint64_t offset, uint64_t size) {
    return offset % 64 == 0 && offset >= sizeof(shm::SessionHeader) && size <= session_bytes() &&
           offset <= session_bytes() - size;
  };
  if (!inside(s.request_ring_offset, shm::kRequestRingBytes) ||
      !inside(s.reply_ring_offset, shm::kReplyRingBytes) ||
      !inside(s.access_counters_offset, shm::kAccessCounters * sizeof(uint32_t))) {
    return bad("an offset lies outside the session segment");
  }
  return OkStatus();
}

bool Connection::Poll() {
  MutexLock lock(mu_);
  while (!gone()) {
    Packet packet;
    Receive(socket_.get(), MSG_DONTWAIT, &packet);
    if (packet.bytes == -EAGAIN || packet.bytes == -EWOULDBLOCK) return true;
    if (packet.bytes <= 0) {
      GiveUp();
    } else if (packet.type() == shm::kArena && packet.fd_count == 1 &&
               packet.bytes == static_cast<ssize_t>(sizeof(shm::Arena))) {
      shm::Arena arena{};
      std::memcpy(&arena, packet.data, sizeof(arena));
      arenas_->Add(arena, std::move(packet.fds[0]));
    }
    // Packets of unknown types are a newer daemon's; nothing here depends on them.
  }
  return false;
}

bool Connection::AwaitPacket(Clock::time_point deadline) {
  if (gone() || Clock::now() >= deadline) return false;
  // In slices: another thread may take the packet that this one waits for.
  pollfd wait{socket_.get(), POLLIN, 0};
  if (poll(&wait, 1, 10) < 0 && errno != EINTR) return false;
  return Poll();
}

void Connection::RingDoorbell() {
  const uint64_t one = 1;
  // EAGAIN: the counter is full, so the daemon has a wake-up pending already.
  [[maybe_unused]] const ssize_t n = write(doorbell_.get(), &one, sizeof(one));
}

Status Connection::SendDescriptor(uint32_t number, int fd, Clock::time_point deadline) {
  shm::Descriptor packet{shm::kDescriptor, number};
  iovec part{&packet, sizeof(packet)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  while (sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == EBADF) {
      return InvalidArgument("TENSOR_HANDLE",
                             "fd is " + std::to_string(fd) + ", which is not open");
    }
    const bool full = errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS;
    if (errno != EINTR && !full) {
      return Unavailable("DAEMON_GONE", std::string("the attach socket: ") + std::strerror(errno));
    }
    if (Clock::now() >= deadline) {
      return {Code::kDeadlineExceeded, "DEADLINE",
              "the daemon does not read the attach socket; look at its log"};
    }
    pollfd wait{socket_.get(), POLLOUT, 0};
    (void)poll(&wait, 1, 10);
  }
  return OkStatus();
}

void Connection::AbandonAfterFork() {
  GiveUp();
  socket_.Reset();  // this process's copy: the parent's lease lives on
  doorbell_.Reset();
  session_.Abandon();
  table_.Abandon();
}

}  // namespace kvstrata::client
