// SPDX-License-Identifier: Apache-2.0
#include "server/tier/remote/remote_names.h"

#include <charconv>

namespace kvstrata::remote {
namespace {

constexpr size_t kPlaceBytes = 8, kNameBytes = 16;  // first bytes of their HMACs
constexpr std::string_view kBegin = "kv1:{";
constexpr std::string_view kDigits = "0123456789abcdef";

void AppendHex(std::span<const uint8_t> bytes, std::string* out) {
  for (const uint8_t byte : bytes) {
    out->push_back(kDigits[byte >> 4]);
    out->push_back(kDigits[byte & 15]);
  }
}

// Takes `bytes` bytes in hexadecimal digits and what follows them from the front.
bool TakeHex(std::string_view* text, size_t bytes, std::string_view behind) {
  const std::string_view digits = text->substr(0, 2 * bytes);
  if (digits.size() != 2 * bytes || digits.find_first_not_of(kDigits) != digits.npos) return false;
  text->remove_prefix(digits.size());
  if (!text->starts_with(behind)) return false;
  text->remove_prefix(behind.size());
  return true;
}

}  // namespace

std::string RemoteNames::NameOf(std::string_view key, std::string_view place,
                                uint32_t stripe) const {
  const HmacKey::Digest where = place_.Of(place.empty() ? key : place);
  const HmacKey::Digest what = name_.Of(key);
  std::string name(kBegin);
  name.reserve(80);
  AppendHex(std::span(where).first(kPlaceBytes), &name);
  name += "}:";
  AppendHex(std::span(what).first(kNameBytes), &name);
  name += ':';
  name += std::to_string(stripe);
  return name;
}

std::optional<uint32_t> StripeOfName(std::string_view name) {
  if (!name.starts_with(kBegin)) return std::nullopt;
  name.remove_prefix(kBegin.size());
  if (!TakeHex(&name, kPlaceBytes, "}:") || !TakeHex(&name, kNameBytes, ":")) return std::nullopt;
  uint32_t stripe = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), stripe);
  const bool whole = error == std::errc() && end == name.data() + name.size();
  if (!whole || (name.size() > 1 && name.front() == '0')) return std::nullopt;
  return stripe;
}

}  // namespace kvstrata::remote
