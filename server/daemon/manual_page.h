// SPDX-License-Identifier: Apache-2.0
// What kvstratad(1) says, and --help in short: exit codes, signals, files. docs/operations.md has
// the same, with more about each; tests/cli/manual_page_test.py holds the three together.
//
// Constant tables and pure functions.
#ifndef KVSTRATA_SERVER_DAEMON_MANUAL_PAGE_H_
#define KVSTRATA_SERVER_DAEMON_MANUAL_PAGE_H_

#include <CLI/CLI.hpp>
#include <string>

namespace kvstrata {

// What --help ends with.
std::string HelpFooter();

// kvstratad(1) in man(7): the options of `app`, every key of the configuration, and the tables.
std::string DaemonManualPage(const CLI::App& app);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_DAEMON_MANUAL_PAGE_H_
