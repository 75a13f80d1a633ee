// SPDX-License-Identifier: Apache-2.0
#include "client/cli/value_key.h"

#include <algorithm>
#include <cctype>
#include <cstddef>

#include "client/cli/hex.h"
#include "proto/chunk_messages.h"

namespace kvstrata::cli {
namespace {

constexpr std::string_view kPin = "pin/";
constexpr std::string_view kChunk = chunks::kKeyPrefix;
constexpr size_t kKeyDigits = 64, kPinDigits = 16;
constexpr size_t kFewestDigits = 4;  // digits of a beginning

// What stands before a key's digits.
std::string_view LeadOf(std::string_view text) {
  return text.starts_with(kPin) ? kPin : text.starts_with(kChunk) ? kChunk : "";
}

}  // namespace

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
