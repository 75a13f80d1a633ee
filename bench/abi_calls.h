// SPDX-License-Identifier: Apache-2.0
// What benchmarks of the C ABI share: an error ends them; threads stay on a core.
#pragma once

#include <kvstrata/kvstrata.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace kvstrata::bench {

// `what` was called, and answered `code`.
inline void Must(int code, const char* what) {
  if (code == KVS_OK) return;
  std::fprintf(stderr, "%s: %s %s: %s\n", what, kvs_code_name(code), kvs_error_reason(),
               kvs_error_message());
  std::exit(1);
}

// A core for the daemon, another for this process: the scheduler may put both on one, and then the
// ring is as slow as a context switch. What is started later inherits it.
inline void RunOn(unsigned core) {
  if (std::thread::hardware_concurrency() < 2) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) std::perror("sched_setaffinity");
}

}  // namespace kvstrata::bench
