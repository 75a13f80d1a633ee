// SPDX-License-Identifier: Apache-2.0
// The top of a thread: what the standard library throws when memory, threads or descriptors run out
// ends one piece of work and not the process.
//
//     while (!stopping) Survive("kvs-import", [&] { RunOne(); });
//
// Whoever asked for that work is to be told by a Status before it comes to this; here it is logged.
// A bug of ours is no exception: it aborts (base/check.h). Cost: none unless something is thrown.
#ifndef KVSTRATA_SERVER_TELEMETRY_THREAD_TOP_H_
#define KVSTRATA_SERVER_TELEMETRY_THREAD_TOP_H_

#include <chrono>
#include <cstddef>
#include <exception>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include "server/telemetry/log.h"

namespace kvstrata {

// A thread's first allocation, and the process's first large one, make jemalloc set up what it has
// for them, and it crashes if there is no memory for that then. So the first come when a thread
// starts, and when the daemon does.
inline void WarmUpAllocator(size_t bytes = 64) { ::operator delete(::operator new(bytes)); }

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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_TELEMETRY_THREAD_TOP_H_
