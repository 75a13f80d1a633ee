#include "server/attach/attach_server.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "server/attach/arena_mailbox.h"
#include "server/attach/descriptor_inbox.h"
#include "server/attach/packet.h"
#include "server/attach/peer.h"
#include "server/attach/ring_session.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr auto kEpollEvery = std::chrono::microseconds(200);  // while rings keep us awake
constexpr int kBacklogRetryMs = 1;
constexpr int kFramesPerTurn = 64;
constexpr int kFramesAtHangUp = 4096;
constexpr int kMaxAcceptsPerTurn = 64;
constexpr int kMaxHandshakesPerUser = 64;
constexpr uint32_t kLogLinesPerSecond = 10;

// What an epoll event belongs to: the connection's number and the kind of descriptor.
enum Kind : uint64_t { kListener, kStop, kTimer, kSocket, kPidfd, kDoorbell, kWake };
constexpr uint64_t kKinds = 8;

void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

Status StartError(const char* what) {
  return Internal("ATTACH_START", std::string("cannot start the attach server: ") + what + ": " +
                                      std::strerror(errno));
}

struct Connection {
  enum class State { kHandshake, kOpen, kDetaching, kFenced };
  State state = State::kHandshake;
  uint64_t number = 0;
  UniqueFd socket, pidfd, doorbell;
  PeerIdentity peer;
  Clock::time_point deadline;
  uint64_t session = 0;
  std::shared_ptr<ArenaMailbox> mailbox;
  std::unique_ptr<DescriptorInbox> inbox;
  std::unique_ptr<RingSession> ring;
};

}  // namespace

class AttachServer::Loop {
 public:
  Loop(const AttachOptions& options, std::unique_ptr<UnixListener> listener, Store* store)
      : options_(options), store_(store), listener_(std::move(listener)) {}
  ~Loop() { Stop(); }

  Status Start();
  void Stop();
  AttachCounters counters() const;

 private:
  enum Counter {
    kAccepted,
    kAttached,
    kRefused,
    kTimedOut,
    kDetached,
    kHungUp,
    kDied,
    kMalformed,
    kFrames,
    kReclaims,
    kCounters
  };
  void Count(Counter c, uint64_t n = 1) { counts_[c].fetch_add(n, std::memory_order_relaxed); }

  void Run();
  bool DrainRings();
  bool PrepareSleep();
  void CancelSleep();
  int SleepMs() const;
  void Poll(int timeout_ms);
  void OnEvent(const epoll_event& event);
  void Tick();

  bool Watch(int fd, Kind kind, uint64_t number, uint32_t events);
  void ArmListener(bool on);
  void Accept();
  void AdmitSocket(UniqueFd socket);
  void OnSocket(Connection* c, uint32_t events);
  void OnHello(Connection* c);
  Status OpenSession(Connection* c, const shm::Hello& hello);
  Status SendWelcome(Connection* c, const SessionSegments& segments, uint32_t device);
  void OnDetach(Connection* c);
  void EndDetached(Connection* c);
  void OnDead(Connection* c);
  void Refuse(Connection* c, const Status& why);
  void HangUp(Connection* c, std::string_view why);
  void CloseChannels(Connection* c);
  void Erase(Connection* c);
  void OnRing(Connection* c, RingSession::Outcome outcome);
  bool MayLog(uint64_t* suppressed);

  // Constant.
  const AttachOptions options_;
  Store* const store_;

  // Self-synchronised.
  std::array<std::atomic<uint64_t>, kCounters> counts_{};
  UniqueFd epoll_, stop_event_, timer_;
  // Shared with those who wake the loop: they may outlive it.
  std::shared_ptr<const UniqueFd> wake_;
  std::thread thread_;

  // The thread's.
  std::unique_ptr<UnixListener> listener_;
  bool listening_ = false;
  bool stopping_ = false;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> open_;  // those with rings
  uint64_t next_number_ = 1;
  LogLimiter limiter_{kLogLinesPerSecond};
};

// --- start and stop ------------------------------------------------------------------------------

Status AttachServer::Loop::Start() {
  epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
  stop_event_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  timer_.Reset(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  wake_ = std::make_shared<const UniqueFd>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !stop_event_ || !timer_ || !*wake_) return StartError("descriptors");
  const long tick_ns = std::chrono::nanoseconds(kTick).count();
  const itimerspec every{{0, tick_ns}, {0, tick_ns}};
  if (timerfd_settime(timer_.get(), 0, &every, nullptr) != 0) return StartError("timer");
  if (!Watch(stop_event_.get(), kStop, 0, EPOLLIN) || !Watch(timer_.get(), kTimer, 0, EPOLLIN) ||
      !Watch(wake_->get(), kWake, 0, EPOLLIN | EPOLLET)) {
    return StartError("epoll");
  }
  ArmListener(true);
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), "kvs-attach");
  return OkStatus();
}

void AttachServer::Loop::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  KVS_CHECK(write(stop_event_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
  for (const auto& [number, c] : connections_) CloseChannels(c.get());
  open_.clear();
  connections_.clear();
  listener_.reset();
}

AttachCounters AttachServer::Loop::counters() const {
  const auto at = [this](Counter c) { return counts_[c].load(std::memory_order_relaxed); };
  return {at(kAccepted), at(kAttached), at(kRefused),   at(kTimedOut), at(kDetached),
          at(kHungUp),   at(kDied),     at(kMalformed), at(kFrames),   at(kReclaims)};
}

// --- the loop ------------------------------------------------------------------------------------

void AttachServer::Loop::Run() {
  Clock::time_point busy_until{}, next_poll{};
  while (!stopping_) {
    const bool worked = DrainRings();
    const Clock::time_point now = Clock::now();
    if (worked) busy_until = now + options_.poll;
    if (now < busy_until) {
      if (now >= next_poll) {
        Poll(0);
        next_poll = now + kEpollEvery;
      }
      if (!worked) CpuRelax();
      continue;
    }
    if (!worked) Poll(PrepareSleep() ? SleepMs() : 0);
    CancelSleep();
  }
}

bool AttachServer::Loop::DrainRings() {
  bool worked = false;
  // By index from the back: a connection that ends is taken out of the list meanwhile.
  for (size_t i = open_.size(); i-- > 0;) {
    Connection* c = open_[i];
    const uint64_t before = c->ring->frames();
    const RingSession::Outcome outcome = c->ring->Drain(kFramesPerTurn);
    Count(kFrames, c->ring->frames() - before);
    worked |= outcome != RingSession::Outcome::kIdle;
    OnRing(c, outcome);
  }
  return worked;
}

void AttachServer::Loop::OnRing(Connection* c, RingSession::Outcome outcome) {
  uint64_t suppressed = 0;
  switch (outcome) {
    case RingSession::Outcome::kIdle:
    case RingSession::Outcome::kWorked:
      return;
    case RingSession::Outcome::kDetached:
      return OnDetach(c);
    case RingSession::Outcome::kMalformed:
      Count(kMalformed);
      if (MayLog(&suppressed)) {
        LogEvent(LogLevel::kWarn, "client_malformed",
                 {{"session", c->session},
                  {"pid", c->peer.pid},
                  {"uid", c->peer.uid},
                  {"why", c->ring->malformed()},
                  {"suppressed", suppressed}});
      }
      return HangUp(c, "malformed frame");
  }
}

bool AttachServer::Loop::PrepareSleep() {
  bool may_sleep = true;
  for (Connection* c : open_) may_sleep &= c->ring->PrepareSleep();
  return may_sleep;
}

void AttachServer::Loop::CancelSleep() {
  for (Connection* c : open_) c->ring->CancelSleep();
}

// Room in a reply ring comes without a doorbell.
int AttachServer::Loop::SleepMs() const {
  const bool retry = std::any_of(open_.begin(), open_.end(),
                                 [](const Connection* c) { return c->ring->has_backlog(); });
  return retry ? kBacklogRetryMs : -1;
}

void AttachServer::Loop::Poll(int timeout_ms) {
  std::array<epoll_event, 64> events;
  const int n = epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
  KVS_CHECK(n >= 0 || errno == EINTR);
  for (int i = 0; i < n; ++i) OnEvent(events[i]);
}

void AttachServer::Loop::OnEvent(const epoll_event& event) {
  const auto kind = static_cast<Kind>(event.data.u64 % kKinds);
  if (kind == kStop) {
    stopping_ = true;
  } else if (kind == kListener) {
    Accept();
  } else if (kind == kTimer) {
    uint64_t expirations;
    if (read(timer_.get(), &expirations, sizeof(expirations)) > 0) Tick();
  } else if (kind != kWake) {  // that one only wakes us
    const auto found = connections_.find(event.data.u64 / kKinds);
    if (found == connections_.end()) return;  // ended by an earlier event of this turn
    if (kind == kSocket) OnSocket(found->second.get(), event.events);
    if (kind == kPidfd) OnDead(found->second.get());
    // A doorbell only wakes us; its counter is never read, since the client could make that block.
  }
}

void AttachServer::Loop::Tick() {
  if (!listening_) ArmListener(true);
  if (store_->Counters().retired_bytes != 0) {
    Count(kReclaims);
    store_->Reclaim();
  }
  store_->ExpirePins();
  for (Connection* c : open_) c->ring->ExpireSettles();
  const Clock::time_point now = Clock::now();
  std::vector<Connection*> late, detaching, unserved;
  for (const auto& [number, c] : connections_) {
    if (c->state == Connection::State::kHandshake && now >= c->deadline) late.push_back(c.get());
    if (c->state == Connection::State::kDetaching && now >= c->deadline) {
      detaching.push_back(c.get());
    }
    if (c->state == Connection::State::kOpen && !c->mailbox->Flush()) unserved.push_back(c.get());
  }
  for (Connection* c : late) {
    Count(kTimedOut);
    Refuse(c, Status(Code::kDeadlineExceeded, "HELLO_TIMEOUT", "no Hello packet in time"));
  }
  for (Connection* c : detaching) EndDetached(c);
  for (Connection* c : unserved) HangUp(c, "arena packets are not read");
}

// --- admission -----------------------------------------------------------------------------------

bool AttachServer::Loop::Watch(int fd, Kind kind, uint64_t number, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number * kKinds + kind;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void AttachServer::Loop::ArmListener(bool on) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kListener;
  const int op = on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL;
  if (epoll_ctl(epoll_.get(), op, listener_->fd(), &event) == 0) listening_ = on;
}

void AttachServer::Loop::Accept() {
  for (int i = 0; i < kMaxAcceptsPerTurn; ++i) {
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
  c->socket = std::move(socket);
  c->deadline = Clock::now() + options_.hello_timeout;
  connections_.emplace(c->number, std::move(connection));
  Result<Peer> peer = PeerOf(c->socket.get());
  if (!peer.ok()) return Refuse(c, peer.status());
  c->peer = peer.value().identity;
  c->pidfd = std::move(peer.value().pidfd);
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
  if (!Watch(c->socket.get(), kSocket, c->number, EPOLLIN | EPOLLRDHUP) ||
      !Watch(c->pidfd.get(), kPidfd, c->number, EPOLLIN)) {
    Refuse(c, ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections"));
  }
}

void AttachServer::Loop::OnSocket(Connection* c, uint32_t events) {
  if (c->state == Connection::State::kFenced) return;  // hung up earlier in this turn
  if (c->state == Connection::State::kDetaching) return EndDetached(c);
  if (c->state == Connection::State::kHandshake) {
    return (events & EPOLLIN) != 0 ? OnHello(c) : Erase(c);
  }
  if ((events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) {
    // What a client commits and then closes at once still counts.
    const RingSession::Outcome last = c->ring->Drain(kFramesAtHangUp);
    if (last == RingSession::Outcome::kDetached) return OnRing(c, last);
    return HangUp(c, "eof");
  }
  if (c->inbox->Receive()) return;
  Count(kMalformed);
  HangUp(c, "a packet after Hello that is no descriptor");
}

void AttachServer::Loop::OnHello(Connection* c) {
  // One byte more than a Hello, to tell a longer packet; descriptors in it are dropped by the
  // kernel.
  struct {
    shm::Hello hello;
    std::byte more;
  } packet{};
  const ssize_t n = recv(c->socket.get(), &packet, sizeof(packet.hello) + 1, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) return Erase(c);  // gone without a word
  Status status = CheckHello(packet.hello, static_cast<size_t>(n));
  if (status.ok()) status = OpenSession(c, packet.hello);
  if (!status.ok()) Refuse(c, status);
}

Status AttachServer::Loop::OpenSession(Connection* c, const shm::Hello& hello) {
  std::string name, uuid;
  KVS_CHECK(ReadText(hello.client_name, &name) &&
            ReadText(hello.device_uuid, &uuid));  // CheckHello
  name = Printable(std::move(name));
  KVS_ASSIGN_OR_RETURN(const uint32_t device, store_->FindDevice(Printable(std::move(uuid))));
  UniqueFd socket(fcntl(c->socket.get(), F_DUPFD_CLOEXEC, 0));
  c->doorbell.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!socket || !c->doorbell) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise "
                             "LimitNOFILE");
  }
  c->mailbox = std::make_shared<ArenaMailbox>(std::move(socket));
  Result<SessionSegments> segments = store_->OpenSession(
      c->peer, Road::kLinked, name,
      [box = c->mailbox](const ArenaGrant& grant) { box->Put(grant); }, device);
  if (!segments.ok()) return segments.status();
  c->session = segments->session;
  Status status = SendWelcome(c, *segments, device);
  if (!status.ok()) {
    store_->EndSession(c->session, SessionEnd::kDetached);  // the client has got nothing
    return status;
  }
  c->state = Connection::State::kOpen;
  open_.push_back(c);
  c->mailbox->Open();
  Count(kAttached);
  LogEvent(LogLevel::kInfo, "attached",
           {{"session", c->session},
            {"client", name},
            {"pid", c->peer.pid},
            {"uid", c->peer.uid},
            {"device", store_->DeviceName(device)}});
  return OkStatus();
}

Status AttachServer::Loop::SendWelcome(Connection* c, const SessionSegments& segments,
                                       uint32_t device) {
  const auto wake = [fd = wake_] {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(fd->get(), &one, sizeof(one));  // full: it wakes too
  };
  c->inbox = std::make_unique<DescriptorInbox>(c->socket.get());
  RingOptions ring{options_.reply_backlog_bytes, options_.settle_timeout, wake};
  if (options_.imports != nullptr) {
    ring.import = options_.imports->NewSession(segments.session, device, c->peer);
  }
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
  CopyText(store_->DeviceName(device), welcome.device_uuid);
  const int fds[] = {segments.session_fd, segments.table_fd, c->doorbell.get()};
  if (SendPacket(c->socket.get(), welcome, fds) != SendOutcome::kSent) {
    return Unavailable("PEER_GONE", "the client hung up before its Welcome");
  }
  return OkStatus();
}

// --- ends ----------------------------------------------------------------------------------------

void AttachServer::Loop::Refuse(Connection* c, const Status& why) {
  Count(kRefused);
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
  store_->EndSession(c->session, SessionEnd::kDetached);
  CloseChannels(c);
  Erase(c);
}

// The connection is gone but the process may live, with its mappings: only its death is the end.
void AttachServer::Loop::HangUp(Connection* c, std::string_view why) {
  LogEvent(LogLevel::kInfo, "hung_up",
           {{"session", c->session}, {"pid", c->peer.pid}, {"why", why}});
  store_->EndSession(c->session, SessionEnd::kEof);
  Count(kHungUp);
  CloseChannels(c);
  c->state = Connection::State::kFenced;
}

void AttachServer::Loop::OnDead(Connection* c) {
  if (c->state != Connection::State::kHandshake) {
    // A dead client's last commits are in the ring, whole or not at all; nobody will use them.
    LogEvent(LogLevel::kInfo, "died", {{"session", c->session}, {"pid", c->peer.pid}});
    store_->EndSession(c->session, SessionEnd::kDied);
    Count(kDied);
  }
  CloseChannels(c);
  Erase(c);
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
  c->socket.Reset();
}

void AttachServer::Loop::Erase(Connection* c) { connections_.erase(c->number); }

bool AttachServer::Loop::MayLog(uint64_t* suppressed) {
  const auto now =
      std::chrono::duration_cast<std::chrono::seconds>(Clock::now().time_since_epoch());
  return limiter_.Allow(now.count(), suppressed);
}

// --- the public class ----------------------------------------------------------------------------

Result<std::unique_ptr<AttachServer>> AttachServer::Start(const AttachOptions& options,
                                                          std::unique_ptr<UnixListener> listener,
                                                          Store* store) {
  auto loop = std::make_unique<Loop>(options, std::move(listener), store);
  KVS_RETURN_IF_ERROR(loop->Start());
  return std::unique_ptr<AttachServer>(new AttachServer(std::move(loop)));
}

AttachServer::AttachServer(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
AttachServer::~AttachServer() = default;
void AttachServer::Stop() { loop_->Stop(); }
AttachCounters AttachServer::counters() const { return loop_->counters(); }

}  // namespace kvstrata
