// SPDX-License-Identifier: Apache-2.0
// The command table as documents: what --help says behind the options, the manual page, and the
// examples of docs/cli.md. Pure functions of the table.
#ifndef KVSTRATA_CLIENT_CLI_REFERENCE_H_
#define KVSTRATA_CLIENT_CLI_REFERENCE_H_

#include <CLI/CLI.hpp>
#include <string>

namespace kvstrata::cli {

// Examples of `verb` ("seq map"), if it has any, and the options that every verb takes.
std::string HelpTail(const CLI::App& root, const std::string& verb);

// kvstrata(1) in man(7).
std::string ManualPage(const CLI::App& root);

// Two lines a verb, as docs/cli.md has them.
std::string ExampleLines(const CLI::App& root);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_REFERENCE_H_
