// SPDX-License-Identifier: Apache-2.0
#include "server/store/reports/value_info.h"

#include "proto/chunk_messages.h"

namespace kvstrata {

std::string_view NameOf(ValueKind kind) {
  constexpr std::string_view kNames[] = {"", "page", "index", "record", "extent", "pin", "chunk"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view NameOf(ValueState state) {
  constexpr std::string_view kNames[] = {"sound", "corrupt", "gone", "unchecked"};
  return kNames[static_cast<size_t>(state)];
}

bool IsChunkKey(std::string_view key) {
  return key.size() == chunks::kTierKeyBytes && key.starts_with(chunks::kKeyPrefix);
}

std::string ValueKeyText(std::string_view key) {
  if (key.starts_with("pin/")) return std::string(key);
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  if (IsChunkKey(key)) {
    text = chunks::kKeyPrefix;
    key.remove_prefix(text.size());
  }
  for (const char c : key) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace kvstrata
