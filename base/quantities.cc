// SPDX-License-Identifier: Apache-2.0
#include "base/quantities.h"

#include <algorithm>
#include <charconv>
#include <span>
#include <utility>

namespace kvstrata {
namespace {

using std::chrono::microseconds;

struct Unit {
  std::string_view name;
  uint64_t worth;
};

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB, kTiB = 1024 * kGiB;
constexpr Unit kSizes[] = {
    {"", 1},       {"B", 1},     {"KiB", kKiB},    {"MiB", kMiB},        {"GiB", kGiB},
    {"TiB", kTiB}, {"KB", 1000}, {"MB", 1000'000}, {"GB", 1000'000'000}, {"TB", 1000'000'000'000}};
constexpr uint64_t kSecond = 1000'000;
// Without a unit there is zero alone: of all else nobody would know what is meant.
constexpr Unit kDurations[] = {{"", 0},
                               {"us", 1},
                               {"ms", 1000},
                               {"s", kSecond},
                               {"m", 60 * kSecond},
                               {"min", 60 * kSecond},
                               {"h", 3600 * kSecond},
                               {"d", 24 * 3600 * kSecond}};

// Splits "512 MiB" into its number and its unit.
std::pair<std::string_view, std::string_view> SplitUnit(std::string_view text) {
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  std::string_view unit = text.substr(digits);
  if (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  return {text.substr(0, digits), unit};
}

// "1.25" is 125 of 10^2.
bool ParseDecimal(std::string_view number, uint64_t* all, uint64_t* of) {
  *of = 1;
  uint64_t part = 0;
  const size_t point = std::min(number.find('.'), number.size());
  if (!ParseNumber(number.substr(0, point), all)) return false;
  if (point == number.size()) return true;
  const std::string_view digits = number.substr(point + 1);
  if (digits.size() > 9 || !ParseNumber(digits, &part)) return false;
  for (size_t i = 0; i < digits.size(); ++i) *of *= 10;
  return !__builtin_mul_overflow(*all, *of, all) && !__builtin_add_overflow(*all, part, all);
}

bool ParseQuantity(std::string_view text, std::span<const Unit> units, uint64_t* out) {
  const auto [number, name] = SplitUnit(text);
  const auto unit = std::ranges::find(units, name, &Unit::name);
  uint64_t all = 0, of = 1;
  if (unit == units.end() || !ParseDecimal(number, &all, &of)) return false;
  if (unit->worth == 0 && all != 0) return false;
  if (__builtin_mul_overflow(all, unit->worth, out) || *out % of != 0) return false;
  *out /= of;
  return true;
}

}  // namespace

bool ParseNumber(std::string_view text, uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseSize(std::string_view text, uint64_t* bytes) {
  return ParseQuantity(text, kSizes, bytes);
}

bool ParseDuration(std::string_view text, microseconds* out) {
  uint64_t us = 0;
  if (!ParseQuantity(text, kDurations, &us)) return false;
  if (us >= static_cast<uint64_t>(microseconds::max().count())) return false;
  *out = microseconds(us);
  return true;
}

std::string WithUnits(std::string_view allowed) {
  std::string text(allowed);
  if (text.find("a size") != text.npos) text += "; a size is " + std::string(kSizeForm);
  if (text.find("a duration") != text.npos) text += "; a duration is " + std::string(kDurationForm);
  return text;
}

}  // namespace kvstrata
