// Options of a plan: one table of names, readers, allowed values, and how each is set and printed.
// Parsing (plan.cc), FormatPlan and docs/plans.md go by this table. Private to kernels/plan*.cc.
//
// Knows no TOML: plan.cc turns what was written into an OptionValue.
// Threads: constant tables and pure functions; any.
#ifndef KVSTRATA_KERNELS_PLAN_OPTIONS_H_
#define KVSTRATA_KERNELS_PLAN_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kernels/plan.h"

namespace kvstrata {

// A value as written: integer, number, text, list of numbers, or something that no option takes.
using OptionValue = std::variant<std::monostate, int64_t, double, std::string, std::vector<double>>;

enum class SetResult : uint8_t { kOk, kRefused, kUnimplemented };

struct PlanOption {
  std::string_view name;
  unsigned readers;  // bit 1 << SelectorKind of the selectors that read it
  SetResult (*set)(const OptionValue& value, Plan* plan);
  std::string (*text)(const Plan& plan);  // as TOML
  std::string (*allowed)();               // "an integer from 1 to 1024"

  bool ReadBy(SelectorKind s) const { return (readers >> static_cast<unsigned>(s)) & 1u; }
};

// In the order in which FormatPlan prints them.
std::span<const PlanOption> PlanOptions();

// Options that the design has and this build has not.
bool IsFutureOption(std::string_view name);

// The name among `known` that is nearest to `name` by edit distance; nothing when none is near.
std::optional<std::string_view> Nearest(std::string_view name,
                                        std::span<const std::string_view> known);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLAN_OPTIONS_H_
