// SPDX-License-Identifier: Apache-2.0
#include "server/attach/handshake.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <cstring>
#include <memory>
#include <utility>

#include "server/attach/peers/hello.h"
#include "server/sockets/packet.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {

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

}  // namespace kvstrata
