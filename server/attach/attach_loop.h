// SPDX-License-Identifier: Apache-2.0
// AttachServer::Loop: the attach server's one thread: it polls the rings and what it watches, and
// has its parts do what follows. How a connection begins: admission.h, handshake.h,
// token_passing.h; how it ends: connection_ends.h. What others do for it, so that it neither
// computes for long nor waits for who does: connection_lending.h, housekeeping.h.
#ifndef KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_
#define KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "base/unique_fd.h"
#include "server/attach/admission.h"
#include "server/attach/attach_server.h"
#include "server/attach/attach_state.h"
#include "server/attach/connection_ends.h"
#include "server/attach/connection_lending.h"
#include "server/attach/handshake.h"
#include "server/attach/housekeeping.h"
#include "server/attach/token_passing.h"
#include "server/telemetry/heartbeat.h"

namespace kvstrata {

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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_ATTACH_LOOP_H_
