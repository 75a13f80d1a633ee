// SPDX-License-Identifier: Apache-2.0
// How a connection to the chunk socket begins.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/descriptors.h"
#include "server/chunks/chunk_loop.h"

namespace kvstrata {
namespace {

constexpr int kAcceptsPerIteration = 16;
constexpr uint64_t kDescriptorsOfConnection = 2;  // its socket, and the process's pidfd
constexpr uint32_t kNoUser = ~uint32_t{0};
constexpr uint32_t kFirstUnnumbered = 1u << 31;  // the kernel's numbers are smaller

}  // namespace

void ChunkServer::Loop::Listen(bool on) {
  if (!on) {
    events_.Unwatch(listener_->fd());
    listening_ = false;
  } else if (events_.Watch(listener_->fd(), EventPoll::kListener, 0, EPOLLIN)) {
    listening_ = true;
  }
}

void ChunkServer::Loop::Accept() {
  for (int i = 0; i < kAcceptsPerIteration; ++i) {
    UniqueFd socket(accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      Admit(std::move(socket));
      continue;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // Spinning here would help nobody; the next tick tries again.
      uint64_t suppressed = 0;
      const int error = errno;
      if (MayLog(&suppressed)) {
        LogEvent(LogLevel::kError, "accept_failed",
                 {{"errno", error}, {"why", std::strerror(error)}, {"suppressed", suppressed}});
      }
      Listen(false);
    }
    return;
  }
}

void ChunkServer::Loop::Admit(UniqueFd socket) {
  const uint64_t number = ++connections_made_;
  auto made = std::make_unique<Connection>(
      number, ChunkLink(PassedFd(std::move(socket), &closer_, kNoUser), options_.backlog_bytes));
  Connection* const c = made.get();
  connections_[number] = std::move(made);
  c->deadline = Clock::now() + options_.hello_timeout;
  Result<PeerProcess> peer = PeerProcessOf(c->link.fd());
  if (!peer.ok()) return Refuse(c, peer.status());
  c->peer = peer->credentials;
  c->process = c->peer.pid != 0 ? c->peer.pid : kFirstUnnumbered + unnumbered_++;
  c->pidfd = std::move(peer->pidfd);
  c->link.SetUser(c->peer.uid);
  if (!closer_.MayTake(c->peer.uid)) {
    return Refuse(
        c, ResourceExhausted("DESCRIPTORS_STUCK",
                             "descriptors that clients of user " + std::to_string(c->peer.uid) +
                                 " passed do not close; end who keeps them open"));
  }
  if (const Status spare = CheckDescriptors(kDescriptorsOfConnection); !spare.ok()) {
    return Refuse(c, spare);
  }
  const auto same_user = [c](const auto& entry) { return entry.second->peer.uid == c->peer.uid; };
  if (std::ranges::count_if(connections_, same_user) > options_.connections) {
    return Refuse(c, ResourceExhausted("CONNECTIONS",
                                       "user " + std::to_string(c->peer.uid) + " has " +
                                           std::to_string(options_.connections) +
                                           " connections to the chunk socket; end some of them"));
  }
  if (!events_.Watch(c->link.fd(), EventPoll::kSocket, number, EPOLLIN | EPOLLRDHUP)) {
    Refuse(c, ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections"));
  }
}

// -- Hello

Status ChunkServer::Loop::CheckHello(const chunks::Hello& hello, size_t bytes,
                                     ChunkPeer* peer) const {
  if (bytes < 3 * sizeof(uint32_t) || hello.type != chunks::Type::kHello ||
      hello.magic != chunks::kMagic) {
    return InvalidArgument("HELLO_MALFORMED", "the first packet is no HELLO of chunks (" +
                                                  std::to_string(bytes) +
                                                  " bytes); is this program an engine's adapter?");
  }
  if (hello.version != chunks::kVersion) {
    return FailedPrecondition("VERSION_MISMATCH",
                              "the client speaks chunk version " + std::to_string(hello.version) +
                                  ", this daemon " + std::to_string(chunks::kVersion) +
                                  "; use the adapter of the daemon's release");
  }
  std::string client;
  const bool text = ReadText(hello.engine, &peer->engine) && ReadText(hello.client_name, &client);
  const bool role = hello.role == chunks::Role::kScheduler || hello.role == chunks::Role::kWorker;
  if (bytes != sizeof(hello) || !text || !role || peer->engine.empty()) {
    return InvalidArgument("HELLO_MALFORMED",
                           "HELLO has " + std::to_string(bytes) + " bytes, role " +
                               std::to_string(static_cast<uint32_t>(hello.role)) +
                               "; needed: 152 bytes, role 0 or 1, engine and client_name with a "
                               "NUL in their 64 bytes, engine not empty");
  }
  peer->role = hello.role;
  peer->row_bytes = hello.row_bytes;
  if (options_.bytes == 0) {
    return Unavailable("CHUNKS_OFF",
                       "chunks.bytes is 0, so this daemon keeps no chunks; set it (--set "
                       "chunks.bytes=8GiB) and restart the daemon, or switch the offload off");
  }
  return ChunkRoom::CheckRow(peer->row_bytes, options_.bytes);
}

void ChunkServer::Loop::OnHello(Connection* c, size_t bytes) {
  chunks::Hello hello{};
  std::memcpy(&hello, packet_.data(), std::min(bytes, sizeof(hello)));
  ChunkPeer peer;
  peer.connection = c->number;
  peer.process = c->process;
  Status status = CheckHello(hello, bytes, &peer);
  if (status.ok()) {
    std::string client;
    (void)ReadText(hello.client_name, &client);
    status = Welcome(c, peer, client);
  }
  if (!status.ok()) Refuse(c, status);
}

Status ChunkServer::Loop::TakeRoom(uint32_t user) {
  if (room_ != nullptr && room_->user() == user) return OkStatus();
  if (room_ != nullptr && room_->in_use()) {
    return ResourceExhausted(
        "CHUNKS_FULL", "all of chunks.bytes (" + std::to_string(options_.bytes) + ") is user " +
                           std::to_string(room_->user()) +
                           "'s, whose engines are still there; end them, or run a daemon of your "
                           "own (--socket PATH)");
  }
  ChunkRoomOptions options;
  options.serial = ++rooms_;
  options.user = user;
  options.bytes = options_.bytes;
  options.write_shown = options_.tiers.write_shown;
  options.write_reused = options_.tiers.write_reused;
  options.counters = &counters_;
  if (tiers_->any()) {
    options.find = [this](std::span<ChunkFind> finds) { tiers_->Find(finds); };
  }
  room_.reset();  // its memory first
  KVS_ASSIGN_OR_RETURN(room_, ChunkRoom::Make(options));
  LogEvent(LogLevel::kInfo, "chunk_region",
           {{"uid", user},
            {"bytes", options_.bytes},
            {"slab_bytes", ChunkRegion::SlabBytes(options_.bytes)}});
  return OkStatus();
}

Status ChunkServer::Loop::Welcome(Connection* c, const ChunkPeer& peer, std::string_view client) {
  if (processes_.IsStale(peer.process)) OnDead(peer.process);
  KVS_RETURN_IF_ERROR(TakeRoom(c->peer.uid));
  if (!processes_.Add(peer.process, std::move(c->pidfd))) {
    return ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more processes");
  }
  KVS_RETURN_IF_ERROR(room_->Join(peer));
  c->joined = true;
  c->engine = Printable(peer.engine);
  LogEvent(LogLevel::kInfo, "chunk_engine_attached",
           {{"engine", c->engine},
            {"client", Printable(std::string(client))},
            {"pid", c->peer.pid},
            {"uid", c->peer.uid},
            {"role", peer.role == chunks::Role::kWorker ? "worker" : "scheduler"},
            {"row_bytes", peer.row_bytes}});
  const chunks::Welcome welcome{chunks::Type::kWelcome, chunks::kVersion, options_.daemon_epoch,
                                room_->bytes(), peer.row_bytes};
  const int region = room_->fd();
  const ChunkPacket packet = NewPacket(c->number, welcome, std::span<const int32_t>());
  if (!c->link.Send(packet.bytes, {&region, 1})) End(c->number, "its packets are not read");
  return OkStatus();
}

void ChunkServer::Loop::Refuse(Connection* c, const Status& why) {
  uint64_t suppressed = 0;
  if (MayLog(&suppressed)) {
    LogEvent(LogLevel::kWarn, "chunk_engine_refused",
             {{"reason", why.reason()},
              {"pid", c->peer.pid},
              {"uid", c->peer.uid},
              {"why", why.message()},
              {"suppressed", suppressed}});
  }
  chunks::Refused refused{};
  refused.type = chunks::Type::kRefused;
  refused.code = static_cast<int32_t>(why.code());
  CopyText(why.reason(), refused.reason);
  CopyText(why.message(), refused.message);
  (void)SendPacket(c->link.fd(), refused);
  End(c->number, why.reason());
}

}  // namespace kvstrata
