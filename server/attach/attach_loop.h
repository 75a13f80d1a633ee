// AttachServer::Loop: the state of the attach server, of its one thread. attach_server.cc: start,
// stop, events and rings; connections.cc: how a connection begins and ends; passing.cc: one that
// only fetches descriptors; lending.cc: what others do for it, so that it neither computes for long
// nor waits for who does.
#ifndef KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_
#define KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "server/attach/arena_mailbox.h"
#include "server/attach/attach_server.h"
#include "server/attach/descriptor_closer.h"
#include "server/attach/descriptor_inbox.h"
#include "server/attach/fair_queue.h"
#include "server/attach/peer.h"
#include "server/attach/ring_session.h"
#include "server/telemetry/heartbeat.h"
#include "server/telemetry/log.h"

namespace kvstrata {

class AttachServer::Loop {
 public:
  Loop(const AttachOptions& options, std::unique_ptr<UnixListener> listener, Store* store)
      : options_(options), store_(store), queue_(options.threads), listener_(std::move(listener)) {}
  ~Loop() { Stop(); }

  Status Start();
  void Stop();
  AttachCounters counters() const;

 private:
  // What an epoll event belongs to: the connection's number and the kind of descriptor.
  enum Kind : uint64_t { kListener, kStop, kTimer, kSocket, kPidfd, kDoorbell, kWake };
  static constexpr uint64_t kKinds = 8;

  struct Connection {
    // kPassed: it redeemed a token, and has no ring.
    enum class State { kHandshake, kOpen, kPassed, kDetaching, kFenced };
    State state = State::kHandshake;
    uint64_t number = 0;
    PassedFd socket;  // descriptors may wait in it
    UniqueFd pidfd, doorbell;
    PeerIdentity peer;
    std::chrono::steady_clock::time_point deadline;
    uint64_t session = 0;
    std::shared_ptr<ArenaMailbox> mailbox;
    std::unique_ptr<DescriptorInbox> inbox;
    std::unique_ptr<RingSession> ring;
    // Set in one that redeemed a token. Gone when the store grants it nothing more: the session has
    // ended, or another connection took this one's place.
    std::weak_ptr<const void> granting;
    bool writes = false;  // the store counts its process as a writer
    // Another thread has it, and the loop looks at nothing of it but its state and deadline; events
    // of these kinds came meanwhile and are no longer watched.
    bool lent = false, socket_muted = false, pidfd_muted = false;
    bool end_is_long = false;
    uint32_t device = 0;
    std::function<void()> then;  // of who lent it
    // What the thread that had it says.
    RingSession::Outcome outcome = RingSession::Outcome::kIdle;
    Status status;
  };

  static constexpr uint32_t kLogLinesPerSecond = 10;
  static constexpr uint32_t kNoUser = ~uint32_t{0};  // the daemon's own work; a peer not yet known

  enum Counter {
    kAccepted,
    kAttached,
    kPassed,
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

  // attach_server.cc
  void Run();
  void RunIteration();
  bool DrainRings();
  bool PrepareSleep();
  void CancelSleep();
  int SleepMs() const;
  void Poll(int timeout_ms);
  void OnEvent(const epoll_event& event);
  void Tick();
  void TickCloser();
  void OnRing(Connection* c, RingSession::Outcome outcome);
  bool Watch(int fd, Kind kind, uint64_t number, uint32_t events);
  bool WatchSocket(const Connection* c) {
    return Watch(c->socket.get(), kSocket, c->number, EPOLLIN | EPOLLRDHUP);
  }
  void ArmListener(bool on);
  bool MayLog(uint64_t* suppressed);

  // lending.cc
  using Then = std::function<void()>;
  // Has another thread do `work` for the connection, and the loop `then` when it has it back.
  void Lend(Connection* c, FairQueue::Length length, std::function<void()> work, Then then);
  void LendRing(Connection* c);
  void TakeBack();
  void Mute(Connection* c, Kind kind);
  void Unmute(Connection* c);
  // Ends the connection's session in the store, then does `then`.
  void EndSession(Connection* c, SessionEnd how, Then then);
  void KeepHouse();
  static void Wake(const UniqueFd& event);

  // connections.cc
  void Accept();
  void AdmitSocket(UniqueFd socket);
  void OnSocket(Connection* c, uint32_t events);
  void OnFirstPacket(Connection* c);
  void OnHello(Connection* c, const shm::Hello& hello, size_t bytes);
  void OnWelcomed(Connection* c, const std::string& name, const Status& status);
  // Runs in another thread.
  Status OpenSession(Connection* c, const std::string& name, const std::string& uuid);
  Status SendWelcome(Connection* c, const SessionSegments& segments);
  void OnLastFrames(Connection* c);
  void OnDetach(Connection* c);
  void EndDetached(Connection* c);
  void OnDead(Connection* c);
  void Refuse(Connection* c, const Status& why);
  void HangUp(Connection* c, std::string_view why);
  void CloseChannels(Connection* c);
  void DropSocket(Connection* c);
  void Erase(Connection* c);

  // passing.cc
  void OnRedeem(Connection* c, const shm::Redeem& redeem, size_t bytes);
  // Runs in another thread.
  Status PassDescriptors(Connection* c, const AttachToken& token);
  Status SendTables(Connection* c, const PassedTables& tables);
  void OnPassed(Connection* c, const Status& status);
  void EndPassing(Connection* c, std::string_view why);
  // Ends those that the store grants nothing more.
  void EndPassedOver();
  void EndWriter(Connection* c);

  // Constant.
  const AttachOptions options_;
  Store* const store_;

  // Self-synchronised.
  std::array<std::atomic<uint64_t>, kCounters> counts_{};
  UniqueFd epoll_, stop_event_, timer_;
  // Shared with those who wake the loop: they may outlive it.
  std::shared_ptr<const UniqueFd> wake_;
  std::thread thread_;
  DescriptorCloser closer_;
  FairQueue queue_;
  std::atomic<bool> housekeeping_{false};  // is under way
  std::atomic<bool> any_returned_{false};
  Mutex returned_mu_;
  // Always with room for all that are lent: releasing needs no memory.
  std::vector<Connection*> returned_ KVS_GUARDED_BY(returned_mu_);

  // The thread's.
  std::unique_ptr<UnixListener> listener_;
  bool listening_ = false;
  bool stopping_ = false;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> open_;  // those with rings that are not lent
  uint64_t next_number_ = 1;
  std::chrono::steady_clock::time_point busy_until_{}, next_poll_{};
  Heartbeat beat_{"kvs-attach"};
  size_t late_closings_ = 0;  // that were told
  LogLimiter limiter_{kLogLinesPerSecond};
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_
