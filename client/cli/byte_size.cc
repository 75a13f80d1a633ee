// SPDX-License-Identifier: Apache-2.0
#include "client/cli/byte_size.h"

#include <CLI/CLI.hpp>

#include "base/quantities.h"

namespace kvstrata::cli {

uint64_t ParseBytes(const std::string& text) {
  uint64_t bytes = 0;
  if (!ParseSize(text, &bytes) || bytes == 0 || bytes > uint64_t{1} << 60) {
    throw CLI::ValidationError(
        "bytes '" + text + "'",
        "allowed: " + std::string(kSizeForm) + ", from 1 to 1 EiB, such as 200MiB or 1.5GiB");
  }
  return bytes;
}

}  // namespace kvstrata::cli
