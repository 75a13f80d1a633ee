// SPDX-License-Identifier: Apache-2.0
// Options of a plan: tables of names, allowed values, and how each is set and printed. Every
// selector and codec has a table in the file of what reads its options; here is what they are made
// of, and which of them a plan reads. Parsing (plan.cc), FormatPlan and docs/plans.md go by them.
// Private to kernels/plan/plan*.cc and to the files of the tables.
//
// Knows no TOML: plan.cc turns what was written into an OptionValue.
// Threads: constant tables and pure functions; any.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kernels/plan/plan.h"

namespace kvstrata {

// A value as written: integer, number, text, list of numbers, truth value, or something that no
// option takes.
using OptionValue =
    std::variant<std::monostate, int64_t, double, std::string, std::vector<double>, bool>;

enum class SetResult : uint8_t { kOk, kRefused };

using PlanCondition = bool (*)(const Plan&);

struct PlanOption {
  std::string_view name;  // as FormatPlan prints it
  SetResult (*set)(const OptionValue& value, Plan* plan);
  std::string (*text)(const Plan& plan);  // as TOML
  std::string (*allowed)();               // "an integer from 1 to 1024"
  // kvstrata's word for it, where `name` is a paper's; written it means the same.
  std::string_view native = {};
  PlanCondition read = nullptr;  // null: by every plan that has the table
  // Options that another option's value switches off: when it is read, and what to say otherwise.
  PlanCondition used = nullptr;
  std::string_view needs = {};
  // Null: always. Of an option that is younger than stored artefacts, which are found by texts
  // without it: where it is not at its default.
  PlanCondition printed = nullptr;

  bool IsCalled(std::string_view written) const {
    return written == name || (!native.empty() && written == native);
  }
  bool ReadBy(const Plan& p) const { return read == nullptr || read(p); }
  bool UsedBy(const Plan& p) const { return ReadBy(p) && (used == nullptr || used(p)); }
  bool PrintedFor(const Plan& p) const { return UsedBy(p) && (printed == nullptr || printed(p)); }

  constexpr PlanOption Or(std::string_view word) const {
    PlanOption option = *this;
    option.native = word;
    return option;
  }
  constexpr PlanOption If(PlanCondition condition) const {
    PlanOption option = *this;
    option.read = condition;
    return option;
  }
  constexpr PlanOption PrintedIf(PlanCondition condition) const {
    PlanOption option = *this;
    option.printed = condition;
    return option;
  }
  constexpr PlanOption When(PlanCondition condition, std::string_view what) const {
    PlanOption option = *this;
    option.used = condition;
    option.needs = what;
    return option;
  }
};

// One table, in the order in which FormatPlan prints it and ParsePlan sets it: a switch before what
// it switches.
struct OptionTable {
  std::span<const PlanOption> rows;
  // What is fine alone and cannot work together, and what cannot serve a model: PLAN_COMBINATION.
  // Null: nothing.
  Status (*check)(const Plan& plan) = nullptr;
  Status (*check_geometry)(const Plan& plan, const Geometry& geometry) = nullptr;
};

// Those of selectors: plan_axes.h.
extern const OptionTable kCommonTable, kNoOptions;  // plan_options.cc
extern const OptionTable kStoredTable;              // plans/codec_rows.cc
#define KVS_TABLE(Kind, name, built) extern const OptionTable k##Kind##Table;
KVS_CODECS(KVS_TABLE)  // plans/PLAN/NAME_options.cc

// The tables that a plan reads, in order: common, its selector's, its codec's, kStoredTable.
std::array<const OptionTable*, 4> TablesOf(const Plan& plan);

// The row that `name` means to this plan; null where it reads none of that name.
const PlanOption* FindOption(const Plan& plan, std::string_view name);

// Whether any plan reads an option of that name.
bool IsOption(std::string_view name);

// The name among `known` that is nearest to `name` by edit distance; nothing when none is near.
std::optional<std::string_view> Nearest(std::string_view name,
                                        std::span<const std::string_view> known);

}  // namespace kvstrata
