// SPDX-License-Identifier: Apache-2.0
// What --help looks like: descriptions are folded below themselves, so that a line fits the
// terminal (LineWidth), and has at most 100 cells; in a pipe without COLUMNS they are whole.
#pragma once

#include <CLI/CLI.hpp>
#include <span>
#include <string>
#include <string_view>

namespace kvstrata::cli {

// Thread-safety: as the environment's, which it reads.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_description(const CLI::App* app) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_subcommand(const CLI::App* verb) const override;
};

// The command table as documents: what --help says behind the options, the manual page, and the
// examples of docs/cli.md. Pure functions of the table.

// Examples of `verb` ("seq map"), if it has any, and the options that every verb takes.
std::string HelpTail(const CLI::App& root, const std::string& verb);

// kvstrata(1) in man(7).
std::string ManualPage(const CLI::App& root);

// Two lines a verb, as docs/cli.md has them.
std::string ExampleLines(const CLI::App& root);

// Examples of every verb: one table for --help, the manual page and docs/cli.md.
struct Examples {
  std::string_view verb;  // "seq map"
  std::string_view first, second;
};

// A row a verb, in the order of the command table.
std::span<const Examples> AllExamples();
// The row of `verb`; null for a noun.
const Examples* ExamplesOf(std::string_view verb);

}  // namespace kvstrata::cli
