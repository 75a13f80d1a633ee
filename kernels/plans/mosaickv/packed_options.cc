// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/packed_options.h"

#include "kernels/plan/plan_rows.h"

namespace kvstrata {
namespace {

constexpr std::string_view kStrategyNames[] = {"fixed", "search"};
constexpr std::string_view kClosingNames[] = {"loss", "drift"};
constexpr NumberRange kLoss = {0, 1};
constexpr NumberRange kTotalLoss = {0, 1e9};

// How far a segment may drift unless the plan says (our choice).
constexpr double kDrift = 1.5;

SetResult SetClosing(const OptionValue& value, Plan* plan) {
  const auto index = IndexIn(kClosingNames, value);
  if (!index) return SetResult::kRefused;
  plan->packed.drift = *index == 0 ? 0 : kDrift;
  return SetResult::kOk;
}

bool Searches(const Plan& plan) { return plan.packed.search; }
bool IsFixed(const Plan& plan) { return !plan.packed.search; }
bool ClosesByLoss(const Plan& plan) { return plan.packed.drift == 0; }
bool ClosesByDrift(const Plan& plan) { return plan.packed.drift > 0; }
constexpr std::string_view kNeedsFixed = "strategy = \"fixed\"";
constexpr std::string_view kNeedsSearch = "strategy = \"search\"";
constexpr std::string_view kNeedsLoss = "closing = \"loss\"";
constexpr std::string_view kNeedsDrift = "closing = \"drift\"";

using PackedOption = RowsOf<&Plan::packed>;
constexpr PlanOption kPackedOptions[] = {
    PackedOption::Name<&PackedOptions::search, kStrategyNames>("strategy"),
    PackedOption::Int<&PackedOptions::keep, 0, 256>("keep").When(IsFixed, kNeedsFixed),
    PackedOption::OneOf<&PackedOptions::neighbours, 1, 2, 4>("neighbours")
        .When(IsFixed, kNeedsFixed),
    PackedOption::OneOf<&PackedOptions::block, 4, 8, 16>("block").When(IsFixed, kNeedsFixed),
    PackedOption::Number<&PackedOptions::max_channel_loss, kLoss>("max_channel_loss")
        .When(Searches, kNeedsSearch),
    PackedOption::Number<&PackedOptions::max_block_loss, kLoss>("max_block_loss")
        .When(Searches, kNeedsSearch),
    PackedOption::Flag<&PackedOptions::truncate>("truncate"),
    PackedOption::Int<&PackedOptions::segment, 16, 1 << 20>("segment"),
    PackedOption::Int<&PackedOptions::buffer, 16, 4096>("buffer"),
    {"closing", SetClosing,
     [](const Plan& p) { return Quoted(kClosingNames[p.packed.drift > 0 ? 1 : 0]); },
     [] { return AnyOf(kClosingNames); }},
    PackedOption::Number<&PackedOptions::close_loss, kTotalLoss>("close_loss")
        .When(ClosesByLoss, kNeedsLoss),
    PackedOption::Number<&PackedOptions::drift, kFactor>("drift").When(ClosesByDrift, kNeedsDrift),
    PackedOption::Int<&PackedOptions::min_segment, 16, 1 << 20>("min_segment")
        .When(ClosesByDrift, kNeedsDrift),
};

Status CheckBuffer(const PackedOptions& own) {
  constexpr int kLargestBlock = 16;
  if (own.buffer % kLargestBlock != 0) {
    return InvalidArgument("PLAN_COMBINATION", Assigned("buffer", own.buffer) +
                                                   " holds no whole number of the largest blocks "
                                                   "of 16 tokens; use a multiple of 16");
  }
  if (own.segment < own.buffer) {
    return InvalidArgument("PLAN_COMBINATION", Assigned("segment", own.segment) +
                                                   " is less than one flush of " +
                                                   Assigned("buffer", own.buffer));
  }
  if (own.drift > 0 && own.min_segment > own.segment) {
    return InvalidArgument("PLAN_COMBINATION", Assigned("min_segment", own.min_segment) +
                                                   " is more than " +
                                                   Assigned("segment", own.segment));
  }
  return OkStatus();
}

Status CheckKeep(const PackedOptions& own, int head_dim) {
  const int stored = own.truncate ? head_dim - head_dim / 4 : head_dim;
  if (own.keep > stored) {
    return InvalidArgument("PLAN_COMBINATION",
                           Assigned("keep", own.keep) + " is more than the " +
                               std::to_string(stored) + " channels of " +
                               Assigned("head_dim", head_dim) + " that may be stored" +
                               (own.truncate ? "; truncate = true drops the lowest quarter" : ""));
  }
  if (own.keep % own.neighbours == 0) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION", Assigned("keep", own.keep) +
                                                 " elements are no whole number of groups of " +
                                                 Assigned("neighbours", own.neighbours));
}

Status CheckPacked(const Plan& plan) {
  constexpr int kLargestHeadDim = 256;
  KVS_RETURN_IF_ERROR(CheckBuffer(plan.packed));
  return CheckKeep(plan.packed, kLargestHeadDim);
}

Status CheckPackedGeometry(const Plan& plan, const Geometry& geometry) {
  return plan.packed.search ? OkStatus() : CheckKeep(plan.packed, geometry.head_dim);
}

}  // namespace

constinit const OptionTable kPackedTable = {kPackedOptions, CheckPacked, CheckPackedGeometry};

}  // namespace kvstrata
