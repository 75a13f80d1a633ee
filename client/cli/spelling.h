// SPDX-License-Identifier: Apache-2.0
// Spelling: which word of a command line is no verb, and what was probably meant. Pure functions.
#pragma once

#include <CLI/CLI.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvstrata::cli {

// Insertions, deletions, substitutions between two words.
size_t EditDistance(std::string_view a, std::string_view b);

// The one of `names` that `word` was probably meant to be: two typing errors away at most, or, of
// long words, a third of them; "": none.
std::string_view Nearest(std::string_view word, std::span<const std::string_view> names);

// "no verb 'seq lst'; did you mean 'ls'? ..." for the first word that names no subcommand where one
// is due; "" if the command line fails for another reason. `words` are argv without the program.
std::string UnknownVerb(const CLI::App& app, const std::vector<std::string>& words);

// "seq map": the verb that the command line names, as far as there is one.
std::string VerbNamed(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace kvstrata::cli
