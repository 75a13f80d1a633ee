// SPDX-License-Identifier: Apache-2.0
#include "base/spare_threads.h"

#include <pthread.h>

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace kvstrata {
namespace {

// Until the probe lets go of the lock all of them exist.
void* WaitForEnd(void* held) {
  const std::lock_guard lock(*static_cast<std::mutex*>(held));
  return nullptr;
}

}  // namespace

Status CheckSpareThreads(int threads) {
  std::mutex held;
  std::vector<pthread_t> made;
  made.reserve(static_cast<size_t>(threads));  // nothing throws while they wait for `held`
  int error = 0;
  {
    const std::lock_guard lock(held);
    while (error == 0 && static_cast<int>(made.size()) < threads) {
      pthread_t thread;
      error = pthread_create(&thread, nullptr, WaitForEnd, &held);
      if (error == 0) made.push_back(thread);
    }
  }
  for (const pthread_t thread : made) pthread_join(thread, nullptr);
  if (error == 0) return OkStatus();
  return ResourceExhausted("THREADS", std::to_string(threads) + " threads are needed and " +
                                          std::to_string(made.size()) +
                                          " can be made: " + std::strerror(error) +
                                          "; raise the user's limit (ulimit -u) or the "
                                          "cgroup's (TasksMax, pids.max)");
}

}  // namespace kvstrata
