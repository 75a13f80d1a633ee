#include "server/attach/attach_server.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "server/attach/attach_loop.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

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
  KVS_RETURN_IF_ERROR(queue_.Start());
  ArmListener(true);
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("THREADS", std::string("cannot make a thread: ") + error.what());
  }
  pthread_setname_np(thread_.native_handle(), "kvs-attach");
  return OkStatus();
}

void AttachServer::Loop::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  KVS_CHECK(write(stop_event_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
  queue_.Stop();
  for (const auto& [number, c] : connections_) CloseChannels(c.get());
  open_.clear();
  connections_.clear();
  listener_.reset();
  closer_.Await(Clock::now() + kAwaitClosing);
}

AttachCounters AttachServer::Loop::counters() const {
  const auto at = [this](Counter c) { return counts_[c].load(std::memory_order_relaxed); };
  return {at(kAccepted),  at(kAttached), at(kPassed),   at(kRefused),
          at(kTimedOut),  at(kDetached), at(kHungUp),   at(kDied),
          at(kMalformed), at(kFrames),   at(kReclaims), closer_.counters()};
}

// --- the loop ------------------------------------------------------------------------------------

void AttachServer::Loop::Run() {
  WarmUpAllocator();
  while (!stopping_) {
    Survive("kvs-attach", [this] { RunIteration(); });
  }
}

void AttachServer::Loop::RunIteration() {
  const LoopIteration iteration(&beat_);
  const bool returned = any_returned_.exchange(false, std::memory_order_acquire);
  if (returned) TakeBack();
  const bool worked = DrainRings() || returned;
  const Clock::time_point now = Clock::now();
  if (worked) busy_until_ = now + options_.poll;
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
  const Quantum& quantum = queue_.long_pending() ? kLoopQuantumBesideLong : kLoopQuantum;
  // By index from the back: a connection that ends is taken out of the list meanwhile.
  for (size_t i = open_.size(); i-- > 0;) {
    Connection* c = open_[i];
    const uint64_t before = c->ring->frames();
    const RingSession::Outcome outcome = c->ring->Drain(quantum);
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
    case RingSession::Outcome::kElsewhere:
      return LendRing(c);
    case RingSession::Outcome::kFailed:
      return HangUp(c, c->ring->malformed());
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
  if (timeout_ms != 0) beat_.End();
  const int n = epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
  KVS_CHECK(n >= 0 || errno == EINTR);
  if (timeout_ms != 0) beat_.Begin();
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
    if (found == connections_.end()) return;  // ended by an earlier event of this iteration
    Connection* const c = found->second.get();
    if (c->lent && kind != kDoorbell) return Mute(c, kind);
    if (kind == kSocket) OnSocket(c, event.events);
    if (kind == kPidfd) OnDead(c);
    // A doorbell only wakes us; its counter is never read, since the client could make that block.
  }
}

void AttachServer::Loop::Tick() {
  if (!listening_) ArmListener(true);
  TickCloser();
  KeepHouse();
  for (Connection* c : open_) c->ring->ExpireSettles();
  const Clock::time_point now = Clock::now();
  EndPassedOver();
  std::vector<Connection*> late, detaching, unserved;
  for (const auto& [number, c] : connections_) {
    if (c->lent) continue;
    if (c->state == Connection::State::kHandshake && now >= c->deadline) late.push_back(c.get());
    if (c->state == Connection::State::kDetaching && now >= c->deadline) {
      detaching.push_back(c.get());
    }
    const bool served =
        c->state == Connection::State::kOpen || c->state == Connection::State::kPassed;
    if (served && !c->mailbox->Flush()) unserved.push_back(c.get());
  }
  for (Connection* c : late) {
    Count(kTimedOut);
    Refuse(c, Status(Code::kDeadlineExceeded, "HELLO_TIMEOUT", "no Hello packet in time"));
  }
  for (Connection* c : detaching) EndDetached(c);
  for (Connection* c : unserved) {
    constexpr std::string_view kWhy = "arena packets are not read";
    c->state == Connection::State::kPassed ? EndPassing(c, kWhy) : HangUp(c, kWhy);
  }
}

void AttachServer::Loop::TickCloser() {
  closer_.Tick();
  const ClosingCounters counts = closer_.counters();
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
