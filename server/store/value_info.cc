// SPDX-License-Identifier: Apache-2.0
#include "server/store/value_info.h"

namespace kvstrata {

std::string_view NameOf(ValueKind kind) {
  constexpr std::string_view kNames[] = {"", "page", "index", "record", "extent", "pin"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view NameOf(ValueState state) {
  constexpr std::string_view kNames[] = {"sound", "corrupt", "gone", "unchecked"};
  return kNames[static_cast<size_t>(state)];
}

std::string ValueKeyText(std::string_view key) {
  if (key.starts_with("pin/")) return std::string(key);
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : key) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace kvstrata
