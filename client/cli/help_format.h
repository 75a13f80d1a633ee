// SPDX-License-Identifier: Apache-2.0
// What --help looks like: descriptions are folded below themselves, so that a line fits the
// terminal (LineWidth), and has at most 100 cells; in a pipe without COLUMNS they are whole.
#ifndef KVSTRATA_CLIENT_CLI_HELP_FORMAT_H_
#define KVSTRATA_CLIENT_CLI_HELP_FORMAT_H_

#include <CLI/CLI.hpp>
#include <string>

namespace kvstrata::cli {

// Thread-safety: as the environment's, which it reads.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_description(const CLI::App* app) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_subcommand(const CLI::App* verb) const override;
};

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_HELP_FORMAT_H_
