// SPDX-License-Identifier: Apache-2.0
#include "client/cli/hex.h"

#include <charconv>

namespace kvstrata::cli {

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

}  // namespace kvstrata::cli
