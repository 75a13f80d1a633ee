// SPDX-License-Identifier: Apache-2.0
// Users and their limits as tables. Pure functions that write to the stream they are given.
#pragma once

#include <ostream>

#include "client/cli/printer.h"

namespace kvstrata::cli {

// {"defaults": UserNumbers, "users": [UserQuota]}, as "what is held / what may be held". Without
// `defaults` there is no line for them.
void PrintQuotas(const Style& style, const Json& document, std::ostream& out);

// Prints those of document["users"] that were refused something, or hold 80 % of a limit or more;
// nothing if there are none. In tables with headers only: elsewhere they are part of the document.
void PrintUsersAtLimits(const Style& style, const Json& document, std::ostream& out);

// What the daemon's cgroup allows of memory, below a table of pools.

// A blank line and a table of document["cgroups"], where there is one and headers are wanted:
// without, rows are the pools' alone. In other formats the document has it already: nothing.
void PrintCgroups(const Style& style, const Json& document, std::ostream& out);

}  // namespace kvstrata::cli
