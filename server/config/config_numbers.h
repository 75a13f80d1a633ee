// SPDX-License-Identifier: Apache-2.0
// Numbers, sizes and durations of configuration keys, each within a range. Functions without state.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/quantities.h"

namespace kvstrata {

inline constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB, kTiB = 1024 * kGiB,
                          kPiB = 1024 * kTiB;

// False, with `*out` as it was: it is none, or out of its range.
template <typename T>
bool NumberIn(std::string_view text, uint64_t low, uint64_t high, T* out) {
  uint64_t n = 0;
  if (!ParseNumber(text, &n) || n < low || n > high) return false;
  *out = static_cast<T>(n);
  return true;
}

inline bool SizeIn(std::string_view text, uint64_t low, uint64_t high, uint64_t* out) {
  uint64_t n = 0;
  if (!ParseSize(text, &n) || n < low || n > high) return false;
  *out = n;
  return true;
}

inline bool DurationIn(std::string_view text, std::chrono::microseconds low,
                       std::chrono::microseconds high, std::chrono::microseconds* out) {
  std::chrono::microseconds n{};
  if (!ParseDuration(text, &n) || n < low || n > high) return false;
  *out = n;
  return true;
}

// A text; whether it is allowed is the caller's to say. True.
inline bool Take(std::string_view text, std::string* out) {
  *out = text;
  return true;
}

inline std::string MiB(uint64_t bytes) { return std::to_string(bytes / kMiB) + " MiB"; }

}  // namespace kvstrata

// How a key is applied (config_keys.h): by an expression over its text `v` and the Config `c`.
#define KVS_READS(expression) [](std::string_view v, Config* c) -> bool { return expression; }
