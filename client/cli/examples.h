// SPDX-License-Identifier: Apache-2.0
// Examples of every verb: one table for --help, the manual page and docs/cli.md.
#ifndef KVSTRATA_CLIENT_CLI_EXAMPLES_H_
#define KVSTRATA_CLIENT_CLI_EXAMPLES_H_

#include <span>
#include <string_view>

namespace kvstrata::cli {

struct Examples {
  std::string_view verb;  // "seq map"
  std::string_view first, second;
};

// A row a verb, in the order of the command table.
std::span<const Examples> AllExamples();
// The row of `verb`; null for a noun.
const Examples* ExamplesOf(std::string_view verb);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_EXAMPLES_H_
