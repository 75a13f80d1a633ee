// SPDX-License-Identifier: Apache-2.0
// Running kvstratad for what it alone knows: its configuration's rules and what it needs of the
// machine.
//
// Threads: one. Cost: a process; blocks until it ends or for `timeout`, after which it is killed.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/status.h"

namespace kvstrata::cli {

// kvstratad beside this executable, else the name alone for PATH.
std::string DaemonProgram();

struct Finished {
  int exit_code = 0;
  std::string output;  // stdout and stderr
};

// NOT_FOUND DAEMON_PROGRAM_MISSING; DEADLINE_EXCEEDED DEADLINE; INTERNAL PIPE. `unfinished`, if
// given: with DEADLINE, what it had written by then.
Result<Finished> RunChild(std::vector<std::string> command, std::chrono::milliseconds timeout,
                          std::string* unfinished = nullptr);

}  // namespace kvstrata::cli
