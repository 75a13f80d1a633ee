// How a connection of the attach server begins: accepted, Hello, Welcome; and how it ends.
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/descriptors.h"
#include "server/attach/attach_loop.h"
#include "server/attach/packet.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxAcceptsPerIteration = 16;
constexpr int kMaxHandshakesPerUser = 64;
constexpr uint64_t kDescriptorsOfSession = 5;

}  // namespace

// --- admission -----------------------------------------------------------------------------------

void AttachServer::Loop::Accept() {
  for (int i = 0; i < kMaxAcceptsPerIteration; ++i) {
    UniqueFd socket(accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      AdmitSocket(std::move(socket));
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
      ArmListener(false);
    }
    return;
  }
}

void AttachServer::Loop::AdmitSocket(UniqueFd socket) {
  Count(kAccepted);
  auto connection = std::make_unique<Connection>();
  Connection* c = connection.get();
  c->number = next_number_++;
  c->socket = PassedFd(std::move(socket), &closer_, kNoUser);
  c->deadline = Clock::now() + options_.hello_timeout;
  connections_.emplace(c->number, std::move(connection));
  Result<Peer> peer = PeerOf(c->socket.get());
  if (!peer.ok()) return Refuse(c, peer.status());
  c->peer = peer.value().identity;
  c->pidfd = std::move(peer.value().pidfd);
  c->socket.set_user(c->peer.uid);
  if (!closer_.MayTake(c->peer.uid)) {
    return Refuse(
        c, ResourceExhausted("DESCRIPTORS_STUCK",
                             "descriptors that clients of user " + std::to_string(c->peer.uid) +
                                 " passed do not close; end who keeps them open"));
  }
  if (!store_->user_limits()->IsOperator(c->peer.tenant)) {
    const Status spare = CheckDescriptors(kDescriptorsOfSession);
    if (!spare.ok()) return Refuse(c, spare);
  }
  const auto same_user = [c](const auto& entry) {
    const Connection& other = *entry.second;
    return other.state == Connection::State::kHandshake && other.peer.uid == c->peer.uid;
  };
  if (std::count_if(connections_.begin(), connections_.end(), same_user) > kMaxHandshakesPerUser) {
    return Refuse(c, ResourceExhausted("TOO_MANY_HANDSHAKES",
                                       "user " + std::to_string(c->peer.uid) + " has " +
                                           std::to_string(kMaxHandshakesPerUser) +
                                           " connections that have not said Hello; retry"));
  }
  if (!WatchSocket(c) || !Watch(c->pidfd.get(), kPidfd, c->number, EPOLLIN)) {
    Refuse(c, ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections"));
  }
}

void AttachServer::Loop::OnSocket(Connection* c, uint32_t events) {
  if (c->state == Connection::State::kFenced) return;  // hung up earlier in this iteration
  if (c->state == Connection::State::kDetaching) return EndDetached(c);
  if (c->state == Connection::State::kHandshake) {
    return (events & EPOLLIN) != 0 ? OnFirstPacket(c) : Erase(c);
  }
  if (c->state == Connection::State::kPassed) {
    const bool hung_up = (events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0;
    return EndPassing(c, hung_up ? "eof" : "a packet after the token");
  }
  if ((events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) return OnLastFrames(c);
  if (c->inbox->Receive()) return;
  Count(kMalformed);
  HangUp(c, "a packet after Hello that is no descriptor");
}

// What a client commits and then closes at once still counts.
void AttachServer::Loop::OnLastFrames(Connection* c) {
  const uint64_t before = c->ring->frames();
  Lend(
      c, FairQueue::Length::kLong, [c] { c->outcome = c->ring->Drain(kLastQuantum); },
      [this, c, before] {
        Count(kFrames, c->ring->frames() - before);
        if (c->outcome == RingSession::Outcome::kDetached) return OnDetach(c);
        HangUp(c, "eof");
      });
}

void AttachServer::Loop::OnFirstPacket(Connection* c) {
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
      return Erase(c);  // gone without a word
    case ReceiveOutcome::kDescriptors:
      return Refuse(c, InvalidArgument("HELLO_MALFORMED", "the first packet passes descriptors"));
    case ReceiveOutcome::kPacket:
      break;
  }
  if (packet.hello.type != shm::kRedeem) return OnHello(c, packet.hello, bytes);
  shm::Redeem redeem;
  std::memcpy(&redeem, &packet, sizeof(redeem));
  OnRedeem(c, redeem, bytes);
}

void AttachServer::Loop::OnHello(Connection* c, const shm::Hello& hello, size_t bytes) {
  if (const Status status = CheckHello(hello, bytes); !status.ok()) return Refuse(c, status);
  std::string name, uuid;
  KVS_CHECK(ReadText(hello.client_name, &name) && ReadText(hello.device_uuid, &uuid));
  name = Printable(std::move(name));
  c->status = ResourceExhausted("MEMORY", "the daemon has no memory for another session");
  Lend(
      c, FairQueue::Length::kShort, [=, this] { c->status = OpenSession(c, name, uuid); },
      [=, this] { OnWelcomed(c, name, c->status); });
}

Status AttachServer::Loop::OpenSession(Connection* c, const std::string& name,
                                       const std::string& uuid) {
  KVS_ASSIGN_OR_RETURN(c->device, store_->devices().FindDevice(Printable(uuid)));
  UniqueFd socket(fcntl(c->socket.get(), F_DUPFD_CLOEXEC, 0));
  c->doorbell.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!socket || !c->doorbell) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise "
                             "LimitNOFILE");
  }
  c->mailbox = std::make_shared<ArenaMailbox>(std::move(socket));
  Result<SessionSegments> segments = store_->sessions().OpenSession(
      c->peer, Transport::kLinked, name,
      [box = c->mailbox](const ArenaGrant& grant) { box->Put(grant); }, c->device);
  if (!segments.ok()) return segments.status();
  c->session = segments->session;
  Status status = ResourceExhausted("MEMORY", "the daemon has no memory for a session");
  Survive("kvs-long", [&] { status = SendWelcome(c, *segments); });
  if (!status.ok()) {
    store_->sessions().EndSession(c->session, SessionEnd::kDetached);  // the client has got nothing
  }
  return status;
}

void AttachServer::Loop::OnWelcomed(Connection* c, const std::string& name, const Status& status) {
  if (!status.ok()) return Refuse(c, status);
  c->state = Connection::State::kOpen;
  open_.push_back(c);
  c->mailbox->Open();
  Count(kAttached);
  LogEvent(LogLevel::kInfo, "attached",
           {{"session", c->session},
            {"client", name},
            {"pid", c->peer.pid},
            {"uid", c->peer.uid},
            {"device", store_->devices().DeviceName(c->device)}});
}

Status AttachServer::Loop::SendWelcome(Connection* c, const SessionSegments& segments) {
  const auto wake = [fd = wake_] { Wake(*fd); };
  c->inbox = std::make_unique<DescriptorInbox>(c->socket.get(), &closer_, c->peer.uid);
  if (options_.imports != nullptr) LetPassDescriptors(c->socket.get(), true);
  RingOptions ring{options_.reply_backlog_bytes, options_.settle_timeout, wake};
  if (options_.imports != nullptr) {
    ring.import = options_.imports->NewSession(segments.session, c->device, c->peer);
  }
  ring.peer = c->peer;
  ring.take_descriptor = [inbox = c->inbox.get()](uint32_t number) { return inbox->Take(number); };
  KVS_ASSIGN_OR_RETURN(c->ring, RingSession::Map(segments, store_, std::move(ring)));
  // Edge-triggered: each ring of the bell is one event.
  if (!Watch(c->doorbell.get(), kDoorbell, c->number, EPOLLIN | EPOLLET)) {
    return ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections");
  }
  shm::Welcome welcome{};
  welcome.type = shm::kWelcome;
  welcome.version = shm::kVersion;
  welcome.session_id = segments.session;
  welcome.daemon_epoch = segments.daemon_epoch;
  welcome.session_bytes = segments.session_bytes;
  welcome.table_bytes = segments.table_bytes;
  CopyText(options_.backend, welcome.backend);
  CopyText(store_->devices().DeviceName(c->device), welcome.device_uuid);
  const int fds[] = {segments.session_fd, segments.table_fd, c->doorbell.get()};
  if (SendPacket(c->socket.get(), welcome, fds) != SendOutcome::kSent) {
    return Unavailable("PEER_GONE", "the client hung up before its Welcome");
  }
  return OkStatus();
}

// --- ends ----------------------------------------------------------------------------------------

void AttachServer::Loop::Refuse(Connection* c, const Status& why) {
  Count(kRefused);
  CountRefusal(why.reason());
  uint64_t suppressed = 0;
  if (MayLog(&suppressed)) {
    LogEvent(LogLevel::kWarn, "attach_refused",
             {{"reason", why.reason()},
              {"pid", c->peer.pid},
              {"uid", c->peer.uid},
              {"why", why.message()},
              {"suppressed", suppressed}});
  }
  SendRefused(c->socket.get(), why);
  CloseChannels(c);
  Erase(c);
}

// The reply is in the ring: the session stays until the client has read it and closed its socket.
void AttachServer::Loop::OnDetach(Connection* c) {
  Count(kDetached);
  LogEvent(LogLevel::kInfo, "detached", {{"session", c->session}});
  std::erase(open_, c);
  c->state = Connection::State::kDetaching;
  c->deadline = Clock::now() + options_.hello_timeout;
  if (c->ring->has_backlog()) EndDetached(c);  // it reads no replies: EOF is its answer
}

void AttachServer::Loop::EndDetached(Connection* c) {
  EndSession(c, SessionEnd::kDetached, [this, c] {
    CloseChannels(c);
    Erase(c);
  });
}

// The connection is gone but the process may live, with its mappings: only its death is the end.
void AttachServer::Loop::HangUp(Connection* c, std::string_view why) {
  LogEvent(LogLevel::kInfo, "hung_up",
           {{"session", c->session}, {"pid", c->peer.pid}, {"why", why}});
  c->state = Connection::State::kFenced;
  EndSession(c, SessionEnd::kEof, [this, c] {
    Count(kHungUp);
    CloseChannels(c);
  });
}

void AttachServer::Loop::OnDead(Connection* c) {
  if (c->state == Connection::State::kHandshake) return Erase(c);
  if (c->writes) return EndWriter(c);
  if (c->state == Connection::State::kPassed) return EndPassing(c, "died");
  // A dead client's last commits are in the ring, whole or not at all; nobody will use them.
  LogEvent(LogLevel::kInfo, "died", {{"session", c->session}, {"pid", c->peer.pid}});
  EndSession(c, SessionEnd::kDied, [this, c] {
    Count(kDied);
    CloseChannels(c);
    Erase(c);
  });
}

// Closes what the client can see; the pidfd stays.
void AttachServer::Loop::CloseChannels(Connection* c) {
  if (c->mailbox) c->mailbox->Close();
  std::erase(open_, c);
  c->ring.reset();
  c->inbox.reset();
  // epoll forgets a descriptor with its last copy, and the client holds one of the doorbell.
  if (c->doorbell) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c->doorbell.get(), nullptr);
  c->doorbell.Reset();
  DropSocket(c);
}

// The client sees it at once, whenever the socket is closed.
void AttachServer::Loop::DropSocket(Connection* c) {
  if (!c->socket) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, c->socket.get(), nullptr);
  shutdown(c->socket.get(), SHUT_RDWR);
  c->socket.Reset();
}

void AttachServer::Loop::Erase(Connection* c) {
  DropSocket(c);
  connections_.erase(c->number);
}

}  // namespace kvstrata
