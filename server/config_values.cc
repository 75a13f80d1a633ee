#include "server/config_values.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace kvstrata {
namespace {

using std::chrono::microseconds;

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB, kTiB = 1024 * kGiB;

// Splits "512 MiB" into its number and its unit.
std::pair<std::string_view, std::string_view> SplitUnit(std::string_view text,
                                                        std::string_view number) {
  const size_t digits = std::min(text.find_first_not_of(number), text.size());
  std::string_view unit = text.substr(digits);
  if (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  return {text.substr(0, digits), unit};
}

}  // namespace

bool ParseNumber(std::string_view text, uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseSize(std::string_view text, uint64_t* bytes) {
  constexpr std::array<std::pair<std::string_view, uint64_t>, 10> units = {{
      {"", 1},
      {"B", 1},
      {"KiB", kKiB},
      {"MiB", kMiB},
      {"GiB", kGiB},
      {"TiB", kTiB},
      {"KB", 1000},
      {"MB", 1000'000},
      {"GB", 1000'000'000},
      {"TB", 1000'000'000'000},
  }};
  const auto [digits, unit] = SplitUnit(text, "0123456789");
  const auto at = std::find_if(units.begin(), units.end(),
                               [u = unit](const auto& entry) { return entry.first == u; });
  uint64_t n = 0;
  if (at == units.end() || !ParseNumber(digits, &n)) return false;
  return !__builtin_mul_overflow(n, at->second, bytes);
}

bool ParseDuration(std::string_view text, microseconds* out) {
  constexpr std::array<std::pair<std::string_view, uint64_t>, 4> units = {{
      {"us", 1},
      {"ms", 1000},
      {"s", 1000'000},
      {"min", 60'000'000},
  }};
  const auto [number, unit] = SplitUnit(text, "0123456789.");
  const size_t point = std::min(number.find('.'), number.size());
  uint64_t whole = 0, part = 0, tenths = 1;
  if (!ParseNumber(number.substr(0, point), &whole) || whole > 1'000'000'000'000) return false;
  if (point != number.size()) {
    const std::string_view digits = number.substr(point + 1);
    if (digits.size() > 9 || !ParseNumber(digits, &part)) return false;
    for (size_t i = 0; i < digits.size(); ++i) tenths *= 10;
  }
  const auto at = std::find_if(units.begin(), units.end(),
                               [u = unit](const auto& entry) { return entry.first == u; });
  const bool zero = whole == 0 && part == 0;
  if (at == units.end() && !(unit.empty() && zero)) return false;
  const uint64_t in_us = at == units.end() ? 0 : at->second;
  if (part * in_us % tenths != 0) return false;
  if (in_us != 0 && whole >= static_cast<uint64_t>(microseconds::max().count()) / in_us)
    return false;
  *out = microseconds(whole * in_us + part * in_us / tenths);
  return true;
}

}  // namespace kvstrata
