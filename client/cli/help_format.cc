// SPDX-License-Identifier: Apache-2.0
#include "client/cli/help_format.h"

#include <algorithm>
#include <sstream>

#include "client/cli/list_fit.h"

namespace kvstrata::cli {
namespace {

// `text` in lines that begin `indent` cells from the left.
std::string Folded(const std::string& text, size_t indent) {
  constexpr size_t kMost = 100, kFewest = 20;  // less is worse to read than what a terminal folds
  const size_t width = std::min(LineWidth(), kMost);
  if (width < indent + kFewest) return text;  // 0, too
  std::string out;
  for (const std::string& line : Wrap(text, width - indent)) {
    out += (out.empty() ? "" : "\n") + line;
  }
  return out;
}

}  // namespace

std::string HelpFormatter::make_description(const CLI::App* app) const {
  const std::string text = app->get_description();
  return text.empty() ? "" : Folded(text, 0) + "\n";
}

// CLI11 puts the lines below each other.
std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return Folded(option->get_description(), get_column_width());
}

std::string HelpFormatter::make_subcommand(const CLI::App* verb) const {
  std::ostringstream out;
  CLI::detail::format_help(out, verb->get_display_name(true),
                           Folded(verb->get_description(), get_column_width()), get_column_width());
  return out.str();
}

}  // namespace kvstrata::cli
