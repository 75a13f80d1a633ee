// SPDX-License-Identifier: Apache-2.0
// Sizes on the command line, as the daemon's configuration takes them (base/quantities.h). Pure
// function.
#ifndef KVSTRATA_CLIENT_CLI_BYTE_SIZE_H_
#define KVSTRATA_CLIENT_CLI_BYTE_SIZE_H_

#include <cstdint>
#include <string>

namespace kvstrata::cli {

// 1 to 1 EiB; throws CLI::ValidationError otherwise.
uint64_t ParseBytes(const std::string& text);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_BYTE_SIZE_H_
