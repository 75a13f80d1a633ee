// SPDX-License-Identifier: Apache-2.0
// How rows of option tables are made (plan_options.h). A file names the part of the plan that its
// options are, once, and then a row an option:
//
//     using MinMaxOption = RowsOf<&Plan::minmax>;
//     constexpr PlanOption kRows[] = {
//         MinMaxOption::Int<&MinMaxOptions::budget, 0, kMaxTokens>("budget"),
//     };
//
// Private to the files of the tables. Threads: constants and pure functions; any.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "kernels/pages/tier.h"
#include "kernels/plan/plan_axes.h"

namespace kvstrata {

inline constexpr int32_t kMaxTokens = kMostMinTokens;
inline constexpr int32_t kMaxPages = 1 << 19;  // times the largest page: kMaxTokens

struct NumberRange {
  double low, high;
  bool above = false;  // low itself is not allowed
};
inline constexpr NumberRange kShare = {0, 1, true};
inline constexpr NumberRange kFactor = {0, 1e6, true};

// Names by value: of an enumeration in its order, or of false and true.
using NameList = std::span<const std::string_view>;
inline constexpr std::string_view kTierNames[] = {NameOf(Tier::kDevice), NameOf(Tier::kHost)};
inline constexpr std::string_view kGroupNames[] = {"max", "softmax"};

// --- values as written ---

SetResult SetInt(const OptionValue& value, int32_t low, int32_t high, int32_t* out);
SetResult SetNumber(const OptionValue& value, const NumberRange& range, double* out);
SetResult SetFlag(const OptionValue& value, bool* out);
std::optional<size_t> IndexIn(NameList names, const OptionValue& value);

template <size_t N, typename Ok>
SetResult SetList(const OptionValue& value, Ok ok, std::array<double, N>* out) {
  const auto* list = std::get_if<std::vector<double>>(&value);
  if (list == nullptr || list->size() != N || !std::all_of(list->begin(), list->end(), ok)) {
    return SetResult::kRefused;
  }
  std::copy(list->begin(), list->end(), out->begin());
  return SetResult::kOk;
}

// --- values as printed, and what is allowed ---

std::string Quoted(std::string_view name);
std::string NumberText(double x);
std::string ListText(std::span<const double> list);
std::string IntAllowed(int32_t low, int32_t high);
std::string NumberAllowed(const NumberRange& range);
std::string AnyOf(NameList names);  // "a", "b" or "c"

// "tau = 3", for refusals.
std::string Assigned(std::string_view name, int64_t value);

// --- rows ---

// Rows of options that are members of Plan::*Part; without a Part, of the plan's own members.
template <auto Part = nullptr>
struct RowsOf {
  template <typename P>
  static constexpr auto& In(P& plan) {
    if constexpr (std::is_null_pointer_v<decltype(Part)>) {
      return plan;
    } else {
      return plan.*Part;
    }
  }

  template <auto Field, int32_t Low, int32_t High>
  static constexpr PlanOption Int(std::string_view name) {
    return {name,
            [](const OptionValue& value, Plan* plan) {
              return SetInt(value, Low, High, &(In(*plan).*Field));
            },
            [](const Plan& plan) { return std::to_string(In(plan).*Field); },
            [] { return IntAllowed(Low, High); }};
  }

  // Few values far apart.
  template <auto Field, int32_t... Values>
  static constexpr PlanOption OneOf(std::string_view name) {
    return {name,
            [](const OptionValue& value, Plan* plan) {
              const int64_t* v = std::get_if<int64_t>(&value);
              if (v == nullptr || !((*v == Values) || ...)) return SetResult::kRefused;
              In(*plan).*Field = static_cast<int32_t>(*v);
              return SetResult::kOk;
            },
            [](const Plan& plan) { return std::to_string(In(plan).*Field); },
            [] {
              std::string text;
              ((text += (text.empty() ? "" : ", ") + std::to_string(Values)), ...);
              return "one of " + text;
            }};
  }

  template <auto Field, const NumberRange& Range>
  static constexpr PlanOption Number(std::string_view name) {
    return {name,
            [](const OptionValue& value, Plan* plan) {
              return SetNumber(value, Range, &(In(*plan).*Field));
            },
            [](const Plan& plan) { return NumberText(In(plan).*Field); },
            [] { return NumberAllowed(Range); }};
  }

  template <auto Field>
  static constexpr PlanOption Flag(std::string_view name) {
    return {
        name,
        [](const OptionValue& value, Plan* plan) { return SetFlag(value, &(In(*plan).*Field)); },
        [](const Plan& plan) { return std::string(In(plan).*Field ? "true" : "false"); },
        [] { return std::string("true or false"); }};
  }

  // An option that is an enumeration, or a truth value.
  template <auto Field, const auto& Known>
  static constexpr PlanOption Name(std::string_view name) {
    return {name,
            [](const OptionValue& value, Plan* plan) {
              const auto index = IndexIn(Known, value);
              if (!index) return SetResult::kRefused;
              auto& field = In(*plan).*Field;
              field = static_cast<std::remove_reference_t<decltype(field)>>(*index);
              return SetResult::kOk;
            },
            [](const Plan& plan) { return Quoted(Known[static_cast<size_t>(In(plan).*Field)]); },
            [] { return AnyOf(Known); }};
  }
};

constexpr bool OverRaw(const Plan& plan) { return plan.codec == CodecKind::kRaw; }

}  // namespace kvstrata
