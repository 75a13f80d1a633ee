// SPDX-License-Identifier: Apache-2.0
#include "client/cli/token_file.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "client/cli/trace.h"

namespace kvstrata::cli {
namespace {

std::string ReadAll(std::istream& in) {
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// errno is that of what failed.
Status Unreadable(const std::string& path) {
  return NotFound("TOKENS_UNREADABLE", "'" + path + "' cannot be read: " + std::strerror(errno));
}

}  // namespace

Result<std::vector<int32_t>> ParseTokens(std::string_view text) {
  constexpr std::string_view kBetween = " \t\r\n,[]";
  std::vector<int32_t> tokens;
  for (size_t at = 0;;) {
    at = std::min(text.find_first_not_of(kBetween, at), text.size());
    if (at == text.size()) return tokens;
    const size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    int32_t token = 0;
    const auto [stop, error] = std::from_chars(text.data() + at, text.data() + end, token);
    if (error != std::errc() || stop != text.data() + end) {
      return InvalidArgument("TOKENS_TEXT", "'" + std::string(text.substr(at, end - at)) +
                                                "' after " + std::to_string(tokens.size()) +
                                                " token ids is none; write 32-bit numbers");
    }
    tokens.push_back(token);
    at = end;
  }
}

Result<std::vector<int32_t>> ReadTokens(const std::string& path) {
  if (path == "-") return ParseTokens(ReadAll(std::cin));
  if (path.ends_with(".safetensors")) {
    KVS_ASSIGN_OR_RETURN(const Trace trace, Trace::Open(path));
    return trace.tokens();
  }
  std::ifstream file(path);
  if (!file) return Unreadable(path);
  errno = 0;
  std::ostringstream text;
  text << file.rdbuf();
  if (text.view().empty() && errno != 0) return Unreadable(path);  // a folder: it opens
  return ParseTokens(text.view());
}

}  // namespace kvstrata::cli
