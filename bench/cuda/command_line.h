// SPDX-License-Identifier: Apache-2.0
// What stands behind an option of a benchmark's command line.
#pragma once

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
