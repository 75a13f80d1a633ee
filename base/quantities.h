// SPDX-License-Identifier: Apache-2.0
// Sizes and durations as text: the one grammar of the configuration and of command lines
// (docs/configuration.md, "Sizes and durations"). Pure functions; any thread. false: it is none,
// and *out is undefined.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvstrata {

// Digits, and nothing else.
bool ParseNumber(std::string_view text, uint64_t* out);
// "4GiB", "1.5 GiB", "16GB", "1048576"; KiB MiB GiB TiB, KB MB GB TB, B or none; whole bytes.
bool ParseSize(std::string_view text, uint64_t* bytes);
// "50us", "500ms", "0.5s", "2 min", "12h", "7d", "0"; us ms s m (or min) h d; whole microseconds.
bool ParseDuration(std::string_view text, std::chrono::microseconds* out);

// For messages: what a size and a duration are made of.
inline constexpr std::string_view kSizeForm =
    "a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB or B";
inline constexpr std::string_view kDurationForm = "a number with us, ms, s, m (or min), h or d";
// What is allowed, as "a duration, 1ms to 60s", and behind it that form; else as it is.
std::string WithUnits(std::string_view allowed);

}  // namespace kvstrata
