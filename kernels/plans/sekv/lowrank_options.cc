// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sekv/lowrank_options.h"

#include "kernels/plan/plan_rows.h"

namespace kvstrata {
namespace {

// A file in the daemon's folder: a plan comes from clients and must not name a path.
SetResult SetParameters(const OptionValue& value, Plan* plan) {
  constexpr size_t kMaxName = 128;
  const auto* name = std::get_if<std::string>(&value);
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  if (name == nullptr || name->size() > kMaxName || name->starts_with('.') ||
      !std::ranges::all_of(*name, plain)) {
    return SetResult::kRefused;
  }
  plan->lowrank.parameters = *name;
  return SetResult::kOk;
}

constexpr NumberRange kDeviations = {0, 100};

using LowRankOption = RowsOf<&Plan::lowrank>;
constexpr PlanOption kLowRankOptions[] = {
    LowRankOption::Number<&LowRankOptions::alpha, kDeviations>("alpha"),
    LowRankOption::Int<&LowRankOptions::l_min, 1, kMaxTokens>("l_min"),
    LowRankOption::Int<&LowRankOptions::r_max, 1, 256>("r_max"),
    LowRankOption::Int<&LowRankOptions::d_route, 0, 256>("d_route"),
    LowRankOption::Int<&LowRankOptions::local, 0, kMaxTokens>("local"),
    {"parameters", SetParameters, [](const Plan& p) { return Quoted(p.lowrank.parameters); },
     [] {
       return std::string(
           "a file's name in the daemon's folder of parameters (letters, digits, '.', '_', '-'), "
           "or \"\" for none");
     }},
    LowRankOption::Name<&LowRankOptions::factors, kTierNames>("factors"),
};

Status CheckRoutes(const Plan& plan, const Geometry& geometry) {
  if (plan.lowrank.d_route <= geometry.head_dim) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION", Assigned("d_route", plan.lowrank.d_route) +
                                                 " directions are more than " +
                                                 Assigned("head_dim", geometry.head_dim) + " has");
}

}  // namespace

constinit const OptionTable kLowRankTable = {kLowRankOptions, nullptr, CheckRoutes};

}  // namespace kvstrata
