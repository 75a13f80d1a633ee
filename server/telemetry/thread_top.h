// SPDX-License-Identifier: Apache-2.0
// The top of a thread: what the standard library throws when memory, threads or descriptors run out
// ends one piece of work and not the process.
//
//     while (!stopping) Survive("kvs-import", [&] { RunOne(); });
//
// Whoever asked for that work is to be told by a Status before it comes to this; here it is logged.
// A bug of ours is no exception: it aborts (base/check.h). Cost: none unless something is thrown.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "server/telemetry/log.h"

namespace kvstrata {

// A thread's first allocation, and the process's first large one, make jemalloc set up what it has
// for them, and it crashes if there is no memory for that then. So the first come when a thread
// starts, and when the daemon does.
inline void WarmUpAllocator(size_t bytes = 64) { ::operator delete(::operator new(bytes)); }

// A thread called `name` (15 characters at most), which warms up its allocator and then runs `run`.
// std::system_error: there are no more threads.
template <typename F>
std::thread StartThread(const char* name, F run) {
  std::thread thread([run = std::move(run)] {
    WarmUpAllocator();
    run();
  });
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

inline void LogSurvived(std::string_view thread, std::string_view why) noexcept {
  try {
    LogEvent(LogLevel::kError, "out_of_resources", {{"thread", thread}, {"why", why}});
  } catch (const std::exception&) {
    // There is not even memory to say so.
  }
  // Somebody else frees some meanwhile; and a thread that fails again and again spins no core.
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Whether `work` came to its end.
template <typename F>
bool Survive(std::string_view thread, F&& work) {
  try {
    std::forward<F>(work)();
    return true;
  } catch (const std::exception& error) {
    LogSurvived(thread, error.what());
    return false;
  }
}

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
class Heartbeat {
 public:
  // `patience`: how many times as long as a loop that serves clients an iteration may take.
  explicit Heartbeat(std::string_view thread, uint32_t patience = 1);
  ~Heartbeat();

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
