// SPDX-License-Identifier: Apache-2.0
// Completion scripts from a command table.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

namespace kvstrata::cli {

// The script for `shell` (bash, zsh or fish) that completes every verb, option and fixed value of
// `root`; file names elsewhere. A pure function of the table.
std::string CompletionScript(const CLI::App& root, const std::string& shell);

// Which of the names that a daemon has at this moment an option or argument takes, as `kvstrata
// __names` lists them: "sequences" of SEQ. "": none that the daemon knows. As pure.
std::string_view LiveKindOf(const CLI::Option& option);

}  // namespace kvstrata::cli
