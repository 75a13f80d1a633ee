// SPDX-License-Identifier: Apache-2.0
// What the daemon's cgroup allows of memory, below a table of pools.
#ifndef KVSTRATA_CLIENT_CLI_CGROUP_TABLE_H_
#define KVSTRATA_CLIENT_CLI_CGROUP_TABLE_H_

#include <ostream>

#include "client/cli/printer.h"

namespace kvstrata::cli {

// A blank line and a table of document["cgroups"], where there is one and headers are wanted:
// without, rows are the pools' alone. In other formats the document has it already: nothing.
void PrintCgroups(const Style& style, const Json& document, std::ostream& out);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_CGROUP_TABLE_H_
