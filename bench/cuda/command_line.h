// SPDX-License-Identifier: Apache-2.0
// What stands behind an option of a benchmark's command line.
#ifndef KVSTRATA_BENCH_CUDA_COMMAND_LINE_H_
#define KVSTRATA_BENCH_CUDA_COMMAND_LINE_H_

#include <string>
#include <string_view>

namespace kvstrata::bench {

// "" where the option, "--only" for example, is not there.
inline std::string Option(int argc, char** argv, std::string_view name) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (argv[i] == name) return argv[i + 1];
  }
  return {};
}

}  // namespace kvstrata::bench

#endif  // KVSTRATA_BENCH_CUDA_COMMAND_LINE_H_
