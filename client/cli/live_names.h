// SPDX-License-Identifier: Apache-2.0
// Names that a daemon has at this moment, for completions. Pure function of the table.
#ifndef KVSTRATA_CLIENT_CLI_LIVE_NAMES_H_
#define KVSTRATA_CLIENT_CLI_LIVE_NAMES_H_

#include <CLI/CLI.hpp>
#include <string_view>

namespace kvstrata::cli {

// Which names an option or argument takes, as `kvstrata __names` lists them: "sequences" of SEQ.
// "": none that the daemon knows.
std::string_view LiveKindOf(const CLI::Option& option);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_LIVE_NAMES_H_
