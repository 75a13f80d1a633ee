// SPDX-License-Identifier: Apache-2.0
// Heartbeats: which of the daemon's loops hangs.
//
// Each loop has a Heartbeat for its life and marks what it does as iterations (LoopIteration). A
// loop that waits for work is in none and healthy, however long it waits; one that is in the same
// iteration for longer than its patience hangs: in a system call, in a driver, behind a lock. Who
// asks for health asks HangingLoops(); nothing here has a thread or a timer.
//
// Ownership: a Heartbeat belongs to its loop; the process knows all that live. Thread-safety: a
// Heartbeat is marked by one thread at a time and read by any; HangingLoops from any. Cost: an
// iteration is two reads of the clock at most and two relaxed stores.
#ifndef KVSTRATA_SERVER_TELEMETRY_HEARTBEAT_H_
#define KVSTRATA_SERVER_TELEMETRY_HEARTBEAT_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvstrata {

class Heartbeat {
 public:
  // `patience`: how many times as long as a loop that serves clients an iteration may take.
  explicit Heartbeat(std::string_view thread, uint32_t patience = 1);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // An iteration begins, behind the last one or after a wait.
  void Begin() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    since_us_.store(std::chrono::duration_cast<std::chrono::microseconds>(now).count(),
                    std::memory_order_relaxed);
  }
  // The loop waits for work.
  void End() { since_us_.store(0, std::memory_order_relaxed); }

 private:
  friend struct HeartbeatList;

  const std::string thread_;
  const uint32_t patience_;
  std::atomic<int64_t> since_us_{0};  // 0: it waits
};

class LoopIteration {
 public:
  explicit LoopIteration(Heartbeat* beat) : beat_(beat) { beat_->Begin(); }
  ~LoopIteration() { beat_->End(); }
  LoopIteration(const LoopIteration&) = delete;
  LoopIteration& operator=(const LoopIteration&) = delete;

 private:
  Heartbeat* const beat_;
};

struct HangingLoop {
  std::string thread;
  std::chrono::seconds since{};
};

// Loops whose iteration has taken longer than their patience times `limit`; the longest first.
std::vector<HangingLoop> HangingLoops(std::chrono::microseconds limit);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_TELEMETRY_HEARTBEAT_H_
