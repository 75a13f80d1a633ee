// SPDX-License-Identifier: Apache-2.0
// StopWatchdog: the thread that ends the process when its stop does not. Until everything is
// settled that outlives the process (disk, checkpoint, socket files) the stop has `timeout`, and
// running out of it is a failure. After that nothing is left to lose: whatever still holds up the
// end, such as a library's thread that waits for a peer, is left behind, with exit code 0.
//
// Takes no lock and waits for nobody, also not for the reader of stderr. Its thread is made here,
// so that a process that gets no more threads can still be stopped; it lives as long as the
// process. Thread-safety: one thread. Constructed once.
#ifndef KVSTRATA_SERVER_DAEMON_STOP_WATCHDOG_H_
#define KVSTRATA_SERVER_DAEMON_STOP_WATCHDOG_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "base/status.h"

namespace kvstrata {

class StopWatchdog {
 public:
  // THREADS, DESCRIPTORS (RESOURCE_EXHAUSTED).
  static Result<StopWatchdog> Start();

  // The stop begins.
  void Begin(std::chrono::microseconds timeout) const;
  // After Begin: from now on the end may be sudden.
  void Settled() const { Tell(); }

 private:
  using Timeout = std::shared_ptr<std::atomic<std::chrono::microseconds>>;  // the thread's too

  StopWatchdog(int told, Timeout timeout) : told_(told), timeout_(std::move(timeout)) {}
  void Tell() const;

  int told_;  // an eventfd that counts the calls; the thread's, never closed
  Timeout timeout_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DAEMON_STOP_WATCHDOG_H_
