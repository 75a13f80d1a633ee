// SPDX-License-Identifier: Apache-2.0
#include "client/cli/arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "base/quantities.h"
#include "client/cli/trace.h"
#include "proto/chunk_messages.h"

namespace kvstrata::cli {
namespace {

std::string ReadAll(std::istream& in) {
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// errno is that of what failed.
Status Unreadable(const std::string& path) {
  return NotFound("TOKENS_UNREADABLE", "'" + path + "' cannot be read: " + std::strerror(errno));
}

constexpr std::string_view kPin = "pin/";
constexpr std::string_view kChunk = chunks::kKeyPrefix;
constexpr size_t kKeyDigits = 64, kPinDigits = 16;
constexpr size_t kFewestDigits = 4;  // digits of a beginning

// What stands before a key's digits.
std::string_view LeadOf(std::string_view text) {
  return text.starts_with(kPin) ? kPin : text.starts_with(kChunk) ? kChunk : "";
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

std::string ToHex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

Result<std::string> FromHex(std::string_view text) {
  std::string bytes;
  for (size_t at = 0; at + 2 <= text.size(); at += 2) {
    unsigned byte = 0;
    const char* end = text.data() + at + 2;
    if (std::from_chars(text.data() + at, end, byte, 16).ptr != end) break;
    bytes += static_cast<char>(byte);
  }
  if (bytes.size() * 2 == text.size() && !bytes.empty()) return bytes;
  return InvalidArgument("KEY_TEXT", "key '" + std::string(text) +
                                         "': write pairs of hexadecimal digits, of a page 64");
}

uint64_t ParseBytes(const std::string& text) {
  uint64_t bytes = 0;
  if (!ParseSize(text, &bytes) || bytes == 0 || bytes > uint64_t{1} << 60) {
    throw CLI::ValidationError(
        "bytes '" + text + "'",
        "allowed: " + std::string(kSizeForm) + ", from 1 to 1 EiB, such as 200MiB or 1.5GiB");
  }
  return bytes;
}

std::string ValueKeyText(std::string_view key) {
  if (key.starts_with(kPin)) return std::string(key);
  if (key.size() != chunks::kTierKeyBytes || !key.starts_with(kChunk)) return ToHex(key);
  return std::string(kChunk) + ToHex(key.substr(kChunk.size()));
}

Result<WrittenKey> ParseValueKey(std::string_view text) {
  const std::string_view lead = LeadOf(text);
  std::string digits(text.substr(lead.size()));
  std::ranges::transform(digits, digits.begin(), [](unsigned char c) { return std::tolower(c); });
  const size_t whole = lead == kPin ? kPinDigits : kKeyDigits;
  const bool hex =
      std::ranges::all_of(digits, [](unsigned char c) { return std::isxdigit(c) != 0; });
  if (!hex || digits.size() < kFewestDigits || digits.size() > whole) {
    return InvalidArgument("KEY_TEXT", "key '" + std::string(text) + "' is not " + kValueKeyForm);
  }
  return WrittenKey{std::string(lead) + digits, digits.size() == whole};
}

std::string ValueKeyBytes(std::string_view text) {
  const std::string_view lead = LeadOf(text);
  if (lead == kPin) return std::string(text);
  return std::string(lead) + FromHex(text.substr(lead.size())).value();
}

}  // namespace kvstrata::cli
