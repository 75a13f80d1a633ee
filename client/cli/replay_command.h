// SPDX-License-Identifier: Apache-2.0
// The document and the table of a replay; docs/cli.md, "replay", is their contract. Pure functions.
#ifndef KVSTRATA_CLIENT_CLI_REPLAY_COMMAND_H_
#define KVSTRATA_CLIENT_CLI_REPLAY_COMMAND_H_

#include <ostream>
#include <string>

#include "client/cli/printer.h"
#include "client/cli/replay.h"

namespace kvstrata::cli {

Json ReplayDocument(const std::string& path, const Trace& trace, const ReplayReport& report);
void PrintReplay(const Style& style, const Json& document, std::ostream& out);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_REPLAY_COMMAND_H_
