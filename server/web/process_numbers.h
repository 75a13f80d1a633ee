// SPDX-License-Identifier: Apache-2.0
// What every process tells Prometheus of itself, by its conventions: from /proc/self.
//
// Any thread. Cost: three small files and a directory; what cannot be read is 0.
#ifndef KVSTRATA_SERVER_WEB_PROCESS_NUMBERS_H_
#define KVSTRATA_SERVER_WEB_PROCESS_NUMBERS_H_

#include <cstdint>

namespace kvstrata {

struct ProcessNumbers {
  double cpu_seconds = 0, started = 0;  // since 1970
  uint64_t resident_bytes = 0, open_descriptors = 0, most_descriptors = 0;
};

ProcessNumbers ReadProcessNumbers();

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WEB_PROCESS_NUMBERS_H_
