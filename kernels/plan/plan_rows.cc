// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan_rows.h"

#include <charconv>

namespace kvstrata {
namespace {

std::string Plain(double x) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, x).ptr};
}

}  // namespace

SetResult SetInt(const OptionValue& value, int32_t low, int32_t high, int32_t* out) {
  const int64_t* v = std::get_if<int64_t>(&value);
  if (v == nullptr || *v < low || *v > high) return SetResult::kRefused;
  *out = static_cast<int32_t>(*v);
  return SetResult::kOk;
}

SetResult SetNumber(const OptionValue& value, const NumberRange& range, double* out) {
  const int64_t* i = std::get_if<int64_t>(&value);
  const double* f = std::get_if<double>(&value);
  if (i == nullptr && f == nullptr) return SetResult::kRefused;
  const double x = f != nullptr ? *f : static_cast<double>(*i);
  if (!(x >= range.low && x <= range.high) || (range.above && x == range.low)) {
    return SetResult::kRefused;
  }
  *out = x + 0.0;  // no -0, which would be printed
  return SetResult::kOk;
}

SetResult SetFlag(const OptionValue& value, bool* out) {
  const bool* v = std::get_if<bool>(&value);
  if (v == nullptr) return SetResult::kRefused;
  *out = *v;
  return SetResult::kOk;
}

std::optional<size_t> IndexIn(NameList names, const OptionValue& value) {
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr) return std::nullopt;
  const auto found = std::ranges::find(names, *name);
  if (found == names.end()) return std::nullopt;
  return static_cast<size_t>(found - names.begin());
}

std::string Quoted(std::string_view name) { return '"' + std::string(name) + '"'; }

std::string NumberText(double x) {
  const std::string text = Plain(x);
  // A large number without point or exponent would be read as an integer, and overflow.
  return text.find_first_of(".ein") == std::string::npos ? text + ".0" : text;
}

std::string ListText(std::span<const double> list) {
  std::string text = "[";
  for (size_t i = 0; i < list.size(); ++i) text += (i > 0 ? ", " : "") + NumberText(list[i]);
  return text + "]";
}

std::string IntAllowed(int32_t low, int32_t high) {
  return "an integer from " + std::to_string(low) + " to " + std::to_string(high);
}

std::string NumberAllowed(const NumberRange& range) {
  return range.above ? "a number above " + Plain(range.low) + " and at most " + Plain(range.high)
                     : "a number from " + Plain(range.low) + " to " + Plain(range.high);
}

std::string AnyOf(NameList names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += Quoted(names[i]);
  }
  return text;
}

std::string Assigned(std::string_view name, int64_t value) {
  return std::string(name) + " = " + std::to_string(value);
}

}  // namespace kvstrata
