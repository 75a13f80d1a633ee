// SPDX-License-Identifier: Apache-2.0
#include "server/attach/handshake.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "server/sockets/packet.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

Status CheckVersion(uint32_t version) {
  if (version == shm::kVersion) return OkStatus();
  return FailedPrecondition("VERSION_MISMATCH", "the client speaks shared-memory version " +
                                                    std::to_string(version) + ", this daemon " +
                                                    std::to_string(shm::kVersion) +
                                                    "; use libkvstrata of its release");
}

// For whoever redeems a token: size, magic, version.
Status CheckRedeem(const shm::Redeem& redeem, size_t bytes) {
  if (bytes == sizeof(redeem) && redeem.magic == shm::kMagic) return CheckVersion(redeem.version);
  return InvalidArgument("REDEEM_MALFORMED",
                         "the packet that redeems a token has " + std::to_string(bytes) +
                             " bytes, or another magic; needed: " + std::to_string(sizeof(redeem)) +
                             " bytes as docs/shm_layout.md has them");
}

// OK, or the Status that refuses a client: size, type, magic, version, texts. `bytes` is what recv
// returned.
Status CheckHello(const shm::Hello& hello, size_t bytes) {
  if (bytes != sizeof(hello) || hello.type != shm::kHello || hello.magic != shm::kMagic) {
    return InvalidArgument("HELLO_MALFORMED", "the first packet is no Hello of kvstrata (" +
                                                  std::to_string(bytes) +
                                                  " bytes); is this program a kvstrata client?");
  }
  KVS_RETURN_IF_ERROR(CheckVersion(hello.version));
  std::string device, name;
  if (!ReadText(hello.device_uuid, &device) || !ReadText(hello.client_name, &name)) {
    return InvalidArgument("HELLO_MALFORMED",
                           "device_uuid or client_name has no NUL in its 64 bytes");
  }
  return OkStatus();
}

}  // namespace

void Handshake::OnFirstPacket(AttachConnection* c) {
  // One byte more than a Hello, to tell a longer packet.
  struct {
    shm::Hello hello;
    std::byte more;
  } packet{};
  constexpr size_t kRoom = sizeof(packet.hello) + 1;
  static_assert(sizeof(shm::Redeem) < sizeof(shm::Hello));
  size_t bytes = 0;
  switch (ReceivePlain(c->socket.get(), {reinterpret_cast<std::byte*>(&packet), kRoom}, &bytes)) {
    case ReceiveOutcome::kNothing:
      return;
    case ReceiveOutcome::kEnd:
      return ends_->Erase(c);  // gone without a word
    case ReceiveOutcome::kDescriptors:
      return ends_->Refuse(
          c, InvalidArgument("HELLO_MALFORMED", "the first packet passes descriptors"));
    case ReceiveOutcome::kPacket:
      break;
  }
  if (packet.hello.type != shm::kRedeem) return OnHello(c, packet.hello, bytes);
  shm::Redeem redeem;
  std::memcpy(&redeem, &packet, sizeof(redeem));
  passing_->OnRedeem(c, redeem, bytes);
}

void Handshake::OnHello(AttachConnection* c, const shm::Hello& hello, size_t bytes) {
  if (const Status status = CheckHello(hello, bytes); !status.ok()) return ends_->Refuse(c, status);
  std::string name, uuid;
  KVS_CHECK(ReadText(hello.client_name, &name) && ReadText(hello.device_uuid, &uuid));
  name = Printable(std::move(name));
  c->status = ResourceExhausted("MEMORY", "the daemon has no memory for another session");
  lending_->Lend(
      c, FairQueue::Length::kShort, [=, this] { c->status = OpenSession(c, name, uuid); },
      [=, this] { OnWelcomed(c, name, c->status); });
}

Status Handshake::OpenSession(AttachConnection* c, const std::string& name,
                              const std::string& uuid) {
  KVS_ASSIGN_OR_RETURN(c->device, state_->store->devices().FindDevice(Printable(uuid)));
  UniqueFd socket(fcntl(c->socket.get(), F_DUPFD_CLOEXEC, 0));
  c->doorbell.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!socket || !c->doorbell) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise "
                             "LimitNOFILE");
  }
  c->mailbox = std::make_shared<ArenaMailbox>(std::move(socket));
  Result<SessionSegments> segments = state_->store->sessions().OpenSession(
      c->peer, Transport::kLinked, name,
      [box = c->mailbox](const ArenaGrant& grant) { box->Put(grant); }, c->device);
  if (!segments.ok()) return segments.status();
  c->session = segments->session;
  Status status = ResourceExhausted("MEMORY", "the daemon has no memory for a session");
  Survive("kvs-long", [&] { status = SendWelcome(c, *segments); });
  if (!status.ok()) {
    // The client has got nothing.
    state_->store->sessions().EndSession(c->session, SessionEnd::kDetached);
  }
  return status;
}

void Handshake::OnWelcomed(AttachConnection* c, const std::string& name, const Status& status) {
  if (!status.ok()) return ends_->Refuse(c, status);
  c->state = AttachConnection::State::kOpen;
  state_->connections.Serve(c);
  c->mailbox->Open();
  state_->counts.Count(AttachCounts::kAttached);
  LogEvent(LogLevel::kInfo, "attached",
           {{"session", c->session},
            {"client", name},
            {"pid", c->peer.pid},
            {"uid", c->peer.uid},
            {"device", state_->store->devices().DeviceName(c->device)}});
}

Status Handshake::SendWelcome(AttachConnection* c, const SessionSegments& segments) {
  c->inbox = std::make_unique<DescriptorInbox>(c->socket.get(), &state_->closer, c->peer.uid);
  if (state_->options.imports != nullptr) LetPassDescriptors(c->socket.get(), true);
  RingOptions ring{state_->options.reply_backlog_bytes, state_->options.settle_timeout,
                   state_->events.waker()};
  if (state_->options.imports != nullptr) {
    ring.import = state_->options.imports->NewSession(segments.session, c->device, c->peer);
  }
  ring.peer = c->peer;
  ring.take_descriptor = [inbox = c->inbox.get()](uint32_t number) { return inbox->Take(number); };
  KVS_ASSIGN_OR_RETURN(c->ring, RingSession::Map(segments, state_->store, std::move(ring)));
  // Edge-triggered: each ring of the bell is one event.
  if (!state_->events.Watch(c->doorbell.get(), EventPoll::kDoorbell, c->number,
                            EPOLLIN | EPOLLET)) {
    return ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections");
  }
  shm::Welcome welcome{};
  welcome.type = shm::kWelcome;
  welcome.version = shm::kVersion;
  welcome.session_id = segments.session;
  welcome.daemon_epoch = segments.daemon_epoch;
  welcome.session_bytes = segments.session_bytes;
  welcome.table_bytes = segments.table_bytes;
  CopyText(state_->options.backend, welcome.backend);
  CopyText(state_->store->devices().DeviceName(c->device), welcome.device_uuid);
  const int fds[] = {segments.session_fd, segments.table_fd, c->doorbell.get()};
  if (SendPacket(c->socket.get(), welcome, fds) != SendOutcome::kSent) {
    return Unavailable("PEER_GONE", "the client hung up before its Welcome");
  }
  return OkStatus();
}

void TokenPassing::OnRedeem(AttachConnection* c, const shm::Redeem& redeem, size_t bytes) {
  const Status status = CheckRedeem(redeem, bytes);
  if (!status.ok()) return ends_->Refuse(c, status);
  AttachToken token;
  std::copy(std::begin(redeem.token), std::end(redeem.token), token.begin());
  c->status = ResourceExhausted("MEMORY", "the daemon has no memory for another connection");
  lending_->Lend(
      c, FairQueue::Length::kShort, [=, this] { c->status = PassDescriptors(c, token); },
      [=, this] { OnPassed(c, c->status); });
}

Status TokenPassing::PassDescriptors(AttachConnection* c, const AttachToken& token) {
  if (state_->options.tokens == nullptr) {
    return Unimplemented("TOKEN_UNKNOWN", "this daemon gives no tokens");
  }
  KVS_ASSIGN_OR_RETURN(const TokenGrant grant, state_->options.tokens->Redeem(c->peer.uid, token));
  UniqueFd socket(fcntl(c->socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!socket) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise LimitNOFILE");
  }
  c->mailbox = std::make_shared<ArenaMailbox>(std::move(socket));
  auto granting = std::make_shared<const char>();
  c->granting = granting;
  const Result<PassedTables> tables =
      state_->store->sessions().PassArenas(grant.session, grant.writable,
                                           [box = c->mailbox, granting = std::move(granting)](
                                               const ArenaGrant& arena) { box->Put(arena); });
  if (!tables.ok()) return tables.status();
  c->session = grant.session;
  c->writes = grant.writable;
  Status status = ResourceExhausted("MEMORY", "the daemon has no memory for another connection");
  Survive("kvs-long", [&] { status = SendTables(c, *tables); });
  // It has got nothing that it could write to.
  if (!status.ok() && std::exchange(c->writes, false)) {
    state_->store->sessions().EndWriter(c->session);
  }
  return status;
}

Status TokenPassing::SendTables(AttachConnection* c, const PassedTables& tables) {
  shm::Tables packet{};
  packet.type = shm::kTables;
  packet.version = shm::kVersion;
  packet.session_id = c->session;
  packet.daemon_epoch = tables.daemon_epoch;
  packet.table_bytes = tables.table_bytes;
  packet.arenas = tables.arenas;
  CopyText(state_->store->devices().DeviceName(tables.device), packet.device_uuid);
  const int fd = tables.table_fd.get();
  if (SendPacket(c->socket.get(), packet, std::span(&fd, 1)) != SendOutcome::kSent) {
    return Unavailable("PEER_GONE", "the client hung up before its descriptors");
  }
  return OkStatus();
}

void TokenPassing::OnPassed(AttachConnection* c, const Status& status) {
  if (!status.ok()) return ends_->Refuse(c, status);
  c->state = AttachConnection::State::kPassed;
  c->mailbox->Open();
  state_->counts.Count(AttachCounts::kPassed);
  LogEvent(LogLevel::kInfo, "descriptors_passed",
           {{"session", c->session},
            {"pid", c->peer.pid},
            {"uid", c->peer.uid},
            {"writable", c->writes}});
  EndPassedOver();
}

// A process that may write keeps its mappings: only its death is the end.
void TokenPassing::EndPassing(AttachConnection* c, std::string_view why) {
  LogEvent(LogLevel::kInfo, "passing_ended",
           {{"session", c->session}, {"pid", c->peer.pid}, {"why", why}});
  c->state = AttachConnection::State::kFenced;
  ends_->CloseChannels(c);
  if (!c->writes) ends_->Erase(c);
}

void TokenPassing::EndPassedOver() {
  std::vector<AttachConnection*> over;
  for (const auto& [number, c] : state_->connections.all()) {
    if (c->state == AttachConnection::State::kPassed && !c->lent && c->granting.expired()) {
      over.push_back(c.get());
    }
  }
  for (AttachConnection* c : over) {
    EndPassing(c, "its session ended, or another process took its place");
  }
}

void TokenPassing::EndWriter(AttachConnection* c) {
  LogEvent(LogLevel::kInfo, "writer_died", {{"session", c->session}, {"pid", c->peer.pid}});
  lending_->Lend(
      c, FairQueue::Length::kShort, [this, c] { state_->store->sessions().EndWriter(c->session); },
      [this, c] {
        ends_->CloseChannels(c);
        ends_->Erase(c);
      });
}

}  // namespace kvstrata
