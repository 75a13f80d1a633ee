// SPDX-License-Identifier: Apache-2.0
// ProgressLine: one line on a terminal's stderr, rewritten; nothing elsewhere.
#ifndef KVSTRATA_CLIENT_CLI_PROGRESS_LINE_H_
#define KVSTRATA_CLIENT_CLI_PROGRESS_LINE_H_

#include <unistd.h>

#include <cstdint>
#include <iostream>

namespace kvstrata::cli {

class ProgressLine {
 public:
  void operator()(const char* phase, int32_t done, int32_t of) const {
    if (enabled_) std::cerr << "\r\x1b[K" << phase << " " << done << "/" << of << std::flush;
  }
  void Clear() const {
    if (enabled_) std::cerr << "\r\x1b[K" << std::flush;
  }

 private:
  const bool enabled_ = isatty(STDERR_FILENO) == 1;
};

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_PROGRESS_LINE_H_
