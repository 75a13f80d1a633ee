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

constexpr std::string_view kOpenOnNames[] = {"all", "upper"};
bool OpensOnUpper(const Plan& plan) { return plan.planes.open_on_upper; }

// Where raw pages stay, they are what a prompt opens on.
Status CheckOpenOn(const Plan& plan) {
  if (!OpensOnUpper(plan) || plan.stored.keep_raw == KeepRaw::kNo) return OkStatus();
  return InvalidArgument(
      "PLAN_COMBINATION",
      "open_on = \"upper\" needs keep_raw = \"no\": with another, what is read from "
      "a tier before a prompt opens is its raw pages");
}

using Rows = RowsOf<&Plan::planes>;
constexpr PlanOption kRows[] = {
    Rows::OneOf<&PlanesOptions::keep, 8, 4>("keep"),
    {"unit", SetUnit, [](const Plan& p) { return std::to_string(p.planes.unit); },
     [] { return IntAllowed(kLeastUnit, kMostUnit) + ", a multiple of 16"; }},
    Rows::Name<&PlanesOptions::lower, kTierNames>("lower").PrintedIf(LowerOnHost),
    Rows::OneOf<&PlanesOptions::hot, 0, 4, 8, 16, 32>("hot")
        .When(LowerOnHost, "lower = \"host\"")
        .PrintedIf(LowerOnHost),
    Rows::Name<&PlanesOptions::open_on_upper, kOpenOnNames>("open_on").PrintedIf(OpensOnUpper),
};

}  // namespace

constinit const OptionTable kPlanesTable = {kRows, CheckOpenOn};

}  // namespace kvstrata
