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

// A value as written: integer, number, text, list of numbers, truth value, or something that no
// option takes.
using OptionValue =
    std::variant<std::monostate, int64_t, double, std::string, std::vector<double>, bool>;

// Who reads an option: a set of choices on the axes, one bit each.
constexpr unsigned Reader(SelectorKind k) { return 1u << static_cast<unsigned>(k); }
constexpr unsigned Reader(CodecKind k) { return 1u << (8 + static_cast<unsigned>(k)); }
constexpr unsigned Reader(SegmenterKind k) { return 1u << (16 + static_cast<unsigned>(k)); }

enum class SetResult : uint8_t { kOk, kRefused };

struct PlanOption {
  std::string_view name;
  unsigned readers;  // any of these choices reads it
  SetResult (*set)(const OptionValue& value, Plan* plan);
  std::string (*text)(const Plan& plan);  // as TOML
  std::string (*allowed)();               // "an integer from 1 to 1024"
  // Options that another option's value switches off: when it is read, and what to say otherwise.
  bool (*used)(const Plan& plan) = nullptr;
  std::string_view needs = {};

  bool ReadBy(const Plan& p) const {
    return readers & (Reader(p.selector) | Reader(p.codec) | Reader(p.segmenter));
  }
  bool UsedBy(const Plan& p) const { return ReadBy(p) && (used == nullptr || used(p)); }
  constexpr PlanOption When(bool (*condition)(const Plan&), std::string_view what) const {
    PlanOption option = *this;
    option.used = condition;
    option.needs = what;
    return option;
  }
};

// In the order in which FormatPlan prints them and ParsePlan sets them: a switch before what it
// switches.
std::span<const PlanOption> PlanOptions();

// The name among `known` that is nearest to `name` by edit distance; nothing when none is near.
std::optional<std::string_view> Nearest(std::string_view name,
                                        std::span<const std::string_view> known);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_PLAN_OPTIONS_H_
