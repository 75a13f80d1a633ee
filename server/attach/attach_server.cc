// SPDX-License-Identifier: Apache-2.0
#include "server/attach/attach_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptors.h"
#include "base/unique_fd.h"
#include "server/attach/attach_state.h"
#include "server/attach/connection_ends.h"
#include "server/attach/handshake.h"
#include "server/attach/peers/peer.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxHandshakesPerUser = 64;
constexpr uint64_t kDescriptorsOfSession = 5;

// Admission: the listener of the attach server, and how a connection begins: accepted, with its
// peer's credentials from the kernel, before a byte of it is read.
//
// Ownership: owns the listener. Thread-safety: the loop's.
class Admission {
 public:
  Admission(AttachState* state, ConnectionEnds* ends, std::unique_ptr<UnixListener> listener)
      : state_(state), ends_(ends), listener_(std::move(listener)) {}

  // Has the loop told of new connections, unless it is. Accept stops that when the daemon is out of
  // descriptors or memory.
  void Listen() {
    if (listening_) return;
    listening_ = state_->events.Watch(listener_->fd(), EventPoll::kListener, 0, EPOLLIN);
  }
  void Accept() {
    const int error =
        listener_->Accept([this](UniqueFd socket) { AdmitSocket(std::move(socket)); });
    if (error == 0) return;
    uint64_t suppressed = 0;
    if (state_->limiter.Allow(&suppressed)) {
      LogEvent(LogLevel::kError, "accept_failed",
               {{"errno", error}, {"why", std::strerror(error)}, {"suppressed", suppressed}});
    }
    state_->events.Unwatch(listener_->fd());
    listening_ = false;  // until the next tick
  }
  void Close() { listener_.reset(); }

 private:
  void AdmitSocket(UniqueFd socket) {
    AttachConnection* const c =
        state_->connections.Add(PassedFd(std::move(socket), &state_->closer, kNoUser));
    c->deadline = Clock::now() + state_->hello_timeout.load();
    Result<Peer> peer = PeerOf(c->socket.get());
    if (!peer.ok()) return ends_->Refuse(c, peer.status());
    c->peer = peer.value().identity;
    c->pidfd = std::move(peer.value().pidfd);
    c->socket.set_user(c->peer.uid);
    if (!state_->closer.MayTake(c->peer.uid)) {
      return ends_->Refuse(
          c, ResourceExhausted("DESCRIPTORS_STUCK",
                               "descriptors that clients of user " + std::to_string(c->peer.uid) +
                                   " passed do not close; end who keeps them open"));
    }
    if (!state_->store->user_limits()->IsOperator(c->peer.tenant)) {
      const Status spare = CheckDescriptors(kDescriptorsOfSession);
      if (!spare.ok()) return ends_->Refuse(c, spare);
    }
    const auto same_user = [c](const auto& entry) {
      const AttachConnection& other = *entry.second;
      return other.state == AttachConnection::State::kHandshake && other.peer.uid == c->peer.uid;
    };
    if (std::ranges::count_if(state_->connections.all(), same_user) > kMaxHandshakesPerUser) {
      return ends_->Refuse(c,
                           ResourceExhausted("TOO_MANY_HANDSHAKES",
                                             "user " + std::to_string(c->peer.uid) + " has " +
                                                 std::to_string(kMaxHandshakesPerUser) +
                                                 " connections that have not said Hello; retry"));
    }
    if (!state_->WatchSocket(c) || !state_->WatchPidfd(c)) {
      ends_->Refuse(c,
                    ResourceExhausted("EPOLL_LIMIT", "the daemon cannot watch more connections"));
    }
  }

  AttachState* const state_;
  ConnectionEnds* const ends_;
  std::unique_ptr<UnixListener> listener_;
  bool listening_ = false;
};

// Housekeeping: what the attach loop sees to at every tick for nobody in particular: memory that
// may be reclaimed, pins and leases that run out, descriptors that do not close. Housekeeping of
// the store runs in another thread, one pass at a time. Thread-safety: the loop's.
class Housekeeping {
 public:
  explicit Housekeeping(AttachState* state) : state_(state) {}

  // Has descriptors closed that wait for it; an event tells of those that do not close.
  void TickCloser() {
    state_->closer.Tick();
    const ClosingCounters counts = state_->closer.counters();
    if (counts.late > late_closings_) {
      LogEvent(LogLevel::kError, "descriptor_close_late",
               {{"descriptors", counts.late},
                {"uid", counts.late_user},
                {"why",
                 "descriptors that this user's clients passed do not close; they keep a thread "
                 "each"}});
    }
    late_closings_ = counts.late;
  }
  // Begins a pass over the store, unless one is under way.
  void KeepHouse() {
    if (under_way_.exchange(true)) return;
    const auto work = [this] {
      Survive("kvs-long", [this] {
        if (state_->store->inspection().Counters().retired_bytes != 0) {
          state_->store->references().Reclaim();
        }
        state_->store->pins().ExpirePins();
        state_->store->leases().ExpireLeases(std::chrono::steady_clock::now());
      });
      under_way_.store(false);
    };
    try {
      state_->queue.Post(kNoUser, FairQueue::Length::kShort, work);
    } catch (const std::bad_alloc&) {
      under_way_.store(false);  // the next tick tries again
    }
  }

 private:
  AttachState* const state_;
  std::atomic<bool> under_way_{false};  // a pass over the store
  size_t late_closings_ = 0;            // that were told
};

using State = AttachConnection::State;

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr auto kEpollEvery = std::chrono::microseconds(200);  // while rings keep us awake
constexpr int kBacklogRetryMs = 1;
constexpr auto kAwaitClosing = std::chrono::milliseconds(100);  // at the end, then others close

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

}  // namespace

// AttachServer::Loop: the attach server's one thread: it polls the rings and what it watches, and
// has its parts do what follows. How a connection begins: Admission, handshake.h;
// how it ends, and what others do for it, so that the loop neither computes for long nor waits for
// who does: connection_ends.h, Housekeeping.
class AttachServer::Loop {
 public:
  Loop(const AttachOptions& options, std::unique_ptr<UnixListener> listener, Store* store)
      : state_(options, store), admission_(&state_, &ends_, std::move(listener)) {}
  ~Loop() { Stop(); }

  Status Start();
  void Stop();
  AttachCounters counters() const;
  void SetHelloTimeout(std::chrono::microseconds timeout) { state_.hello_timeout = timeout; }

 private:
  void Run();
  void RunIteration();
  bool DrainRings();
  void OnRing(AttachConnection* c, RingSession::Outcome outcome);
  void LendRing(AttachConnection* c);
  bool PrepareSleep();
  void CancelSleep();
  int SleepMs() const;
  void Poll(int timeout_ms);
  void OnEvent(const epoll_event& event);
  void OnSocket(AttachConnection* c, uint32_t events);
  void OnLastFrames(AttachConnection* c);
  void OnDead(AttachConnection* c);
  void Tick();

  AttachState state_;
  ConnectionLending lending_{&state_};
  ConnectionEnds ends_{&state_, &lending_};
  TokenPassing passing_{&state_, &lending_, &ends_};
  Handshake handshake_{&state_, &lending_, &ends_, &passing_};
  Admission admission_;
  Housekeeping housekeeping_{&state_};

  UniqueFd stop_event_, timer_;
  std::thread thread_;

  // The thread's.
  bool stopping_ = false;
  std::chrono::steady_clock::time_point busy_until_{}, next_poll_{};
  Heartbeat beat_{"kvs-attach"};
};

// --- start and stop ------------------------------------------------------------------------------

Status AttachServer::Loop::Start() {
  const bool opened = state_.events.Open();
  stop_event_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  timer_.Reset(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!opened || !stop_event_ || !timer_) return StartError("descriptors");
  const long tick_ns = std::chrono::nanoseconds(kTick).count();
  const itimerspec every{{0, tick_ns}, {0, tick_ns}};
  if (timerfd_settime(timer_.get(), 0, &every, nullptr) != 0) return StartError("timer");
  if (!state_.events.Watch(stop_event_.get(), EventPoll::kStop, 0, EPOLLIN) ||
      !state_.events.Watch(timer_.get(), EventPoll::kTimer, 0, EPOLLIN) ||
      !state_.events.WatchWake()) {
    return StartError("epoll");
  }
  KVS_RETURN_IF_ERROR(state_.queue.Start());
  admission_.Listen();
  try {
    thread_ = StartThread("kvs-attach", [this] { Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("THREADS", std::string("cannot make a thread: ") + error.what());
  }
  return OkStatus();
}

void AttachServer::Loop::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  KVS_CHECK(write(stop_event_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
  state_.queue.Stop();
  for (const auto& [number, c] : state_.connections.all()) ends_.CloseChannels(c.get());
  state_.connections.Clear();
  admission_.Close();
  state_.closer.Await(Clock::now() + kAwaitClosing);
}

AttachCounters AttachServer::Loop::counters() const {
  using enum AttachCounts::Counter;
  const auto at = [this](AttachCounts::Counter c) { return state_.counts.of(c); };
  return {at(kAttached), at(kPassed), at(kRefused),   at(kTimedOut), at(kDetached),
          at(kHungUp),   at(kDied),   at(kMalformed), at(kFrames),   state_.closer.counters()};
}

// --- the loop ------------------------------------------------------------------------------------

void AttachServer::Loop::Run() {
  while (!stopping_) {
    Survive("kvs-attach", [this] { RunIteration(); });
  }
}

void AttachServer::Loop::RunIteration() {
  const LoopIteration iteration(&beat_);
  const bool returned = lending_.TakeBack();
  const bool worked = DrainRings() || returned;
  const Clock::time_point now = Clock::now();
  if (worked) busy_until_ = now + state_.options.poll;
  if (now < busy_until_) {
    if (now >= next_poll_) {
      Poll(0);
      next_poll_ = now + kEpollEvery;
    }
    if (!worked) CpuRelax();
    return;
  }
  if (!worked) Poll(PrepareSleep() ? SleepMs() : 0);
  CancelSleep();
}

bool AttachServer::Loop::DrainRings() {
  bool worked = false;
  // While somebody computes for long he may hold the store's lock for long.
  const Quantum& quantum = state_.queue.long_pending() ? kLoopQuantumBesideLong : kLoopQuantum;
  // By index from the back: a connection that ends is taken out of the list meanwhile.
  for (size_t i = state_.connections.open().size(); i-- > 0;) {
    AttachConnection* c = state_.connections.open()[i];
    const uint64_t before = c->ring->frames();
    const RingSession::Outcome outcome = c->ring->Drain(quantum);
    state_.counts.Count(AttachCounts::kFrames, c->ring->frames() - before);
    worked |= outcome != RingSession::Outcome::kIdle;
    OnRing(c, outcome);
  }
  return worked;
}

void AttachServer::Loop::OnRing(AttachConnection* c, RingSession::Outcome outcome) {
  uint64_t suppressed = 0;
  switch (outcome) {
    case RingSession::Outcome::kIdle:
    case RingSession::Outcome::kWorked:
      return;
    case RingSession::Outcome::kDetached:
      return ends_.OnDetach(c);
    case RingSession::Outcome::kElsewhere:
      return LendRing(c);
    case RingSession::Outcome::kFailed:
      return ends_.HangUp(c, c->ring->malformed());
    case RingSession::Outcome::kMalformed:
      state_.counts.Count(AttachCounts::kMalformed);
      if (state_.limiter.Allow(&suppressed)) {
        LogEvent(LogLevel::kWarn, "client_malformed",
                 {{"session", c->session},
                  {"pid", c->peer.pid},
                  {"uid", c->peer.uid},
                  {"why", c->ring->malformed()},
                  {"suppressed", suppressed}});
      }
      return ends_.HangUp(c, "malformed frame");
  }
}

bool AttachServer::Loop::PrepareSleep() {
  bool may_sleep = true;
  for (AttachConnection* c : state_.connections.open()) may_sleep &= c->ring->PrepareSleep();
  return may_sleep;
}

void AttachServer::Loop::CancelSleep() {
  for (AttachConnection* c : state_.connections.open()) c->ring->CancelSleep();
}

// Room in a reply ring comes without a doorbell.
int AttachServer::Loop::SleepMs() const {
  const bool retry = std::ranges::any_of(
      state_.connections.open(), [](const AttachConnection* c) { return c->ring->has_backlog(); });
  return retry ? kBacklogRetryMs : -1;
}

void AttachServer::Loop::Poll(int timeout_ms) {
  std::array<epoll_event, 64> events;
  if (timeout_ms != 0) beat_.End();
  const int n = state_.events.Wait(events, timeout_ms);
  if (timeout_ms != 0) beat_.Begin();
  for (int i = 0; i < n; ++i) OnEvent(events[i]);
}

void AttachServer::Loop::OnEvent(const epoll_event& event) {
  using enum EventPoll::Kind;
  const EventPoll::Kind kind = EventPoll::KindOf(event);
  if (kind == kStop) {
    stopping_ = true;
  } else if (kind == kListener) {
    admission_.Accept();
  } else if (kind == kTimer) {
    uint64_t expirations;
    if (read(timer_.get(), &expirations, sizeof(expirations)) > 0) Tick();
  } else if (kind != kWake) {  // that one only wakes us
    AttachConnection* const c = state_.connections.Find(EventPoll::NumberOf(event));
    if (c == nullptr) return;  // ended by an earlier event of this iteration
    if (c->lent && kind != kDoorbell) return lending_.Mute(c, kind);
    if (kind == kSocket) OnSocket(c, event.events);
    if (kind == kPidfd) OnDead(c);
    // A doorbell only wakes us; its counter is never read, since the client could make that block.
  }
}

void AttachServer::Loop::Tick() {
  admission_.Listen();
  housekeeping_.TickCloser();
  housekeeping_.KeepHouse();
  for (AttachConnection* c : state_.connections.open()) c->ring->ExpireSettles();
  const Clock::time_point now = Clock::now();
  passing_.EndPassedOver();
  std::vector<AttachConnection*> late, detaching, unserved;
  for (const auto& [number, c] : state_.connections.all()) {
    if (c->lent) continue;
    if (c->state == State::kHandshake && now >= c->deadline) late.push_back(c.get());
    if (c->state == State::kDetaching && now >= c->deadline) detaching.push_back(c.get());
    const bool served = c->state == State::kOpen || c->state == State::kPassed;
    if (served && !c->mailbox->Flush()) unserved.push_back(c.get());
  }
  for (AttachConnection* c : late) {
    state_.counts.Count(AttachCounts::kTimedOut);
    ends_.Refuse(c, Status(Code::kDeadlineExceeded, "HELLO_TIMEOUT", "no Hello packet in time"));
  }
  for (AttachConnection* c : detaching) ends_.EndDetached(c);
  for (AttachConnection* c : unserved) {
    constexpr std::string_view kWhy = "arena packets are not read";
    c->state == State::kPassed ? passing_.EndPassing(c, kWhy) : ends_.HangUp(c, kWhy);
  }
}

void AttachServer::Loop::LendRing(AttachConnection* c) {
  const uint64_t before = c->ring->frames();
  const auto length =
      c->ring->next_is_long() ? FairQueue::Length::kLong : FairQueue::Length::kShort;
  lending_.Lend(
      c, length, [c] { c->outcome = c->ring->Drain(kLentQuantum); },
      [this, c, before] {
        state_.counts.Count(AttachCounts::kFrames, c->ring->frames() - before);
        state_.connections.Serve(c);
        OnRing(c, c->outcome);
      });
}

void AttachServer::Loop::OnSocket(AttachConnection* c, uint32_t events) {
  if (c->state == State::kFenced) return;  // hung up earlier in this iteration
  if (c->state == State::kDetaching) return ends_.EndDetached(c);
  if (c->state == State::kHandshake) {
    return (events & EPOLLIN) != 0 ? handshake_.OnFirstPacket(c) : ends_.Erase(c);
  }
  if (c->state == State::kPassed) {
    const bool hung_up = (events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0;
    return passing_.EndPassing(c, hung_up ? "eof" : "a packet after the token");
  }
  if ((events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) return OnLastFrames(c);
  if (c->inbox->Receive()) return;
  state_.counts.Count(AttachCounts::kMalformed);
  ends_.HangUp(c, "a packet after Hello that is no descriptor");
}

// What a client commits and then closes at once still counts.
void AttachServer::Loop::OnLastFrames(AttachConnection* c) {
  const uint64_t before = c->ring->frames();
  lending_.Lend(
      c, FairQueue::Length::kLong, [c] { c->outcome = c->ring->Drain(kLastQuantum); },
      [this, c, before] {
        state_.counts.Count(AttachCounts::kFrames, c->ring->frames() - before);
        if (c->outcome == RingSession::Outcome::kDetached) return ends_.OnDetach(c);
        ends_.HangUp(c, "eof");
      });
}

void AttachServer::Loop::OnDead(AttachConnection* c) {
  if (c->state == State::kHandshake) return ends_.Erase(c);
  if (c->writes) return passing_.EndWriter(c);
  if (c->state == State::kPassed) return passing_.EndPassing(c, "died");
  ends_.EndDead(c);
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
void AttachServer::SetHelloTimeout(std::chrono::microseconds timeout) {
  loop_->SetHelloTimeout(timeout);
}

}  // namespace kvstrata
