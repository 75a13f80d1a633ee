// AttachServer::Loop: the state of the attach server, of its one thread. attach_server.cc: start,
// stop, events and rings; connections.cc: how a connection begins and ends.
#ifndef KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_
#define KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "server/attach/arena_mailbox.h"
#include "server/attach/attach_server.h"
#include "server/attach/descriptor_inbox.h"
#include "server/attach/peer.h"
#include "server/attach/ring_session.h"
#include "server/telemetry/log.h"

namespace kvstrata {

class AttachServer::Loop {
 public:
  Loop(const AttachOptions& options, std::unique_ptr<UnixListener> listener, Store* store)
      : options_(options), store_(store), listener_(std::move(listener)) {}
  ~Loop() { Stop(); }

  Status Start();
  void Stop();
  AttachCounters counters() const;

 private:
  // What an epoll event belongs to: the connection's number and the kind of descriptor.
  enum Kind : uint64_t { kListener, kStop, kTimer, kSocket, kPidfd, kDoorbell, kWake };
  static constexpr uint64_t kKinds = 8;

  struct Connection {
    enum class State { kHandshake, kOpen, kDetaching, kFenced };
    State state = State::kHandshake;
    uint64_t number = 0;
    UniqueFd socket, pidfd, doorbell;
    PeerIdentity peer;
    std::chrono::steady_clock::time_point deadline;
    uint64_t session = 0;
    std::shared_ptr<ArenaMailbox> mailbox;
    std::unique_ptr<DescriptorInbox> inbox;
    std::unique_ptr<RingSession> ring;
  };

  static constexpr uint32_t kLogLinesPerSecond = 10;

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

  // attach_server.cc
  void Run();
  bool DrainRings();
  bool PrepareSleep();
  void CancelSleep();
  int SleepMs() const;
  void Poll(int timeout_ms);
  void OnEvent(const epoll_event& event);
  void Tick();
  void OnRing(Connection* c, RingSession::Outcome outcome);
  bool Watch(int fd, Kind kind, uint64_t number, uint32_t events);
  void ArmListener(bool on);
  bool MayLog(uint64_t* suppressed);

  // connections.cc
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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_
