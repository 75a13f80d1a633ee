// SPDX-License-Identifier: Apache-2.0
// Options of codec `planes`.
#include "kernels/ops/pack_planes/planes_format.h"
#include "kernels/plan/plan_rows.h"

namespace kvstrata {
namespace {

constexpr int32_t kLeastUnit = 16, kMostUnit = 256;

SetResult SetUnit(const OptionValue& value, Plan* plan) {
  int32_t unit = 0;
  const SetResult set = SetInt(value, kLeastUnit, kMostUnit, &unit);
  if (set != SetResult::kOk || unit % kStripTokens != 0) return SetResult::kRefused;
  plan->planes.unit = unit;
  return SetResult::kOk;
}

bool LowerOnHost(const Plan& plan) { return plan.planes.lower == Tier::kHost; }

using Rows = RowsOf<&Plan::planes>;
constexpr PlanOption kRows[] = {
    Rows::OneOf<&PlanesOptions::keep, 8, 4>("keep"),
    {"unit", SetUnit, [](const Plan& p) { return std::to_string(p.planes.unit); },
     [] { return IntAllowed(kLeastUnit, kMostUnit) + ", a multiple of 16"; }},
    Rows::Name<&PlanesOptions::lower, kTierNames>("lower").PrintedIf(LowerOnHost),
    Rows::OneOf<&PlanesOptions::hot, 0, 4, 8, 16, 32>("hot")
        .When(LowerOnHost, "lower = \"host\"")
        .PrintedIf(LowerOnHost),
};

}  // namespace

constinit const OptionTable kPlanesTable = {kRows};

}  // namespace kvstrata
