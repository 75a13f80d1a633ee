// SPDX-License-Identifier: Apache-2.0
// Completion scripts from a command table.
#ifndef KVSTRATA_CLIENT_CLI_COMPLETION_H_
#define KVSTRATA_CLIENT_CLI_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <string>

namespace kvstrata::cli {

// The script for `shell` (bash, zsh or fish) that completes every verb, option and fixed value of
// `root`; file names elsewhere. A pure function of the table.
std::string CompletionScript(const CLI::App& root, const std::string& shell);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_COMPLETION_H_
