// SPDX-License-Identifier: Apache-2.0
// How users are named: "uid:1000", as PeerIdentity::tenant. Pure; any thread.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvstrata {

inline std::string UserName(uint32_t uid) { return "uid:" + std::to_string(uid); }

// Nothing for what UserName does not write: "uid:007" would be a user that nobody is.
inline std::optional<uint32_t> UidOf(std::string_view user) {
  constexpr std::string_view kPrefix = "uid:";
  constexpr uint32_t kNobodys = 0xFFFFFFFF;  // (uid_t)-1
  if (!user.starts_with(kPrefix)) return std::nullopt;
  const std::string_view digits = user.substr(kPrefix.size());
  uint32_t uid = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), uid);
  if (error != std::errc() || uid == kNobodys || UserName(uid) != user) return std::nullopt;
  return uid;
}

}  // namespace kvstrata
