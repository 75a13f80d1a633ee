// SPDX-License-Identifier: Apache-2.0
// What the command line of kvstratad says, as a configuration: main.cc parses the flags, this reads
// everything else. Thread-safety: none; before any thread.
#ifndef KVSTRATA_SERVER_DAEMON_COMMAND_LINE_H_
#define KVSTRATA_SERVER_DAEMON_COMMAND_LINE_H_

#include <string>
#include <vector>

#include "server/config/config.h"

namespace kvstrata {

struct CommandLine {
  std::string socket, file, log_level;
  std::vector<std::string> settings;  // KEY=VALUE
  bool check = false;                 // --check-config
  bool deep = false;                  // --deep: and what doctor.h looks at
  bool json = false;                  // -o json
  bool manual = false;                // --manual: prints its manual page
  int ready_fd = -1;
};

// With all mistakes: of the flags, of the configuration and, to check (but not deep), of what this
// machine is.
LoadedConfig Load(const CommandLine& line);

// The end of --check-config: warnings to stderr, the good news to stdout; the exit code.
int TellCheck(const LoadedConfig& loaded);
// The same of --deep: all findings to stdout.
int TellFindings(const LoadedConfig& loaded, bool json);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DAEMON_COMMAND_LINE_H_
