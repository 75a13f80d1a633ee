// SPDX-License-Identifier: Apache-2.0
#include "client/cli/plan_text.h"

#include <algorithm>

namespace kvstrata::cli {
namespace {

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// Where the option that starts at `begin` ends: a comma or the closing brace outside of quotes and
// brackets.
size_t EndOfOption(std::string_view text, size_t begin) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = begin; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\') {
      ++i;
    } else if (c == '"') {
      quoted = !quoted;
    } else if (!quoted && (c == '[' || c == '{')) {
      ++depth;
    } else if (!quoted && depth > 0 && (c == ']' || c == '}')) {
      --depth;
    } else if (!quoted && depth == 0 && (c == ',' || c == '}')) {
      return i;
    }
  }
  return text.size();
}

std::string Unquoted(std::string_view value) {
  if (value.size() >= 2 && value.front() == '"' && value.back() == '"') {
    value = value.substr(1, value.size() - 2);
  }
  return std::string(value);
}

}  // namespace

std::string PlanOption(std::string_view text, std::string_view key) {
  const size_t brace = text.find('{');
  if (brace == std::string_view::npos) return "";
  for (size_t begin = brace + 1; begin < text.size();) {
    const size_t end = EndOfOption(text, begin);
    const std::string_view option = text.substr(begin, end - begin);
    const size_t equals = std::min(option.find('='), option.size());
    if (equals < option.size() && Trim(option.substr(0, equals)) == key) {
      return Unquoted(Trim(option.substr(equals + 1)));
    }
    begin = end + 1;
  }
  return "";
}

bool StoresRaw(std::string_view text) { return PlanOption(text, "codec") == "raw"; }

bool AttendsPositionsOnly(std::string_view text) {
  const std::string rest = PlanOption(text, "rest");
  return StoresRaw(text) && (rest.empty() || rest == "drop") &&
         PlanOption(text, "tree") != "true" && PlanOption(text, "compact") != "true";
}

}  // namespace kvstrata::cli
