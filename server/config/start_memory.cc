// SPDX-License-Identifier: Apache-2.0
#include "server/config/start_memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <string>
#include <thread>

#include "server/config/config_numbers.h"

namespace kvstrata {
namespace {

// What a start was seen to take besides its threads, and half of that again for the first requests.
constexpr uint64_t kBesideThreads = 64 * kMiB;
// jemalloc's: an arena for each thread, up to four a core, of a first chunk and what describes it.
constexpr uint64_t kThreadArena = 5 * kMiB / 2;
constexpr uint32_t kArenasPerCore = 4;

uint32_t Cores() { return std::max(1u, std::thread::hardware_concurrency()); }

// A thread's stack, its guard included.
uint64_t StackBytes() {
  pthread_attr_t attributes;
  if (pthread_getattr_default_np(&attributes) != 0) return 8 * kMiB;
  size_t stack = 0, guard = 0;
  pthread_attr_getstacksize(&attributes, &stack);
  pthread_attr_getguardsize(&attributes, &guard);
  pthread_attr_destroy(&attributes);
  return stack + guard;
}

bool MayReserve(uint64_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const at = mmap(nullptr, bytes, PROT_NONE, kFlags, -1, 0);
  return at != MAP_FAILED && munmap(at, bytes) == 0;
}

}  // namespace

uint32_t OpThreads(const Config& config) { return config.threads != 0 ? config.threads : Cores(); }

uint32_t StartThreads(const Config& config) {
  constexpr uint32_t kOthers = 32;  // loops, the remote transport's queue, gRPC's
  return kOthers + config.work.threads + config.tier_pages.loads.readers + OpThreads(config);
}

Status CheckStartMemory(const Config& config) {
  const uint64_t threads = StartThreads(config), stack = StackBytes();
  const uint64_t arenas = std::min<uint64_t>(threads, uint64_t{kArenasPerCore} * Cores());
  const uint64_t needed = threads * stack + arenas * kThreadArena + kBesideThreads;
  if (MayReserve(needed)) return OkStatus();
  uint64_t left = needed / kMiB * kMiB;
  while (left > 0 && !MayReserve(left)) left -= kMiB;
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  return ResourceExhausted(
      "MEMORY", MiB(needed) + " of address space are needed to start, " + std::to_string(threads) +
                    " threads' stacks of " + std::to_string(stack / 1024) +
                    " KiB among them, and " + MiB(left) + " are left of a limit of " +
                    MiB(limit.rlim_cur) +
                    "; raise RLIMIT_AS (ulimit -v, LimitAS), or lower RLIMIT_STACK");
}

}  // namespace kvstrata
