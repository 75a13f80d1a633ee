// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/loss_limit.h"

#include <algorithm>
#include <cstdio>

namespace kvstrata {
namespace {

// Elements of a vector that are tried after what the plan asks for, in sixteenths of head_dim.
constexpr int32_t kMilderSixteenths[] = {6, 8, 10, 12, 14, 16};

std::string Digits(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", x);
  return text;
}

// Whether any head keeps more than before.
bool KeepAtLeast(int32_t keep, SegmentPlans* plans) {
  bool changed = false;
  for (HeadPlan& head : plans->heads) {
    if (head.strategy.keep >= keep) continue;
    head.strategy.keep = keep;
    head.strategy.neighbours = 1;
    changed = true;
  }
  return changed;
}

std::string Asked(const Plan& plan) {
  if (plan.packed.search) return "what strategy = \"search\" found";
  if (plan.packed.keep == 0) return "keep = 0 (head_dim / 4)";
  return "keep = " + std::to_string(plan.packed.keep);
}

std::string Refused(const Plan& plan, Run tokens, double refused_loss) {
  return "tokens " + std::to_string(tokens.begin) + " to " + std::to_string(tokens.end) +
         ": some " + std::to_string(kLossRun) + " of them lose " + Digits(refused_loss) + " by " +
         Asked(plan) + ", more than max_loss = " + Digits(plan.stored.max_loss);
}

}  // namespace

Result<LimitedPack> PackWithinLimit(const SegmentPacker& packer, const RecompressInput& input,
                                    const Geometry& geometry, const Plan& plan,
                                    const PackedRange& range, std::span<const double> recent,
                                    SegmentPlans* plans) {
  PackedRange tried = range;
  const auto pack = [&] { return packer.PackRange(input, geometry, plan, *plans, tried, recent); };
  KVS_ASSIGN_OR_RETURN(PackedBytes packed, pack());
  const auto fits = [&] { return packed.info.worst_loss <= plan.stored.max_loss; };
  if (fits()) return LimitedPack{std::move(packed)};
  tried.info.refused_loss = packed.info.worst_loss;
  const int32_t dim = geometry.head_dim, stored = plan.packed.truncate ? dim - dim / 4 : dim;
  for (const int32_t sixteenths : kMilderSixteenths) {
    if (!KeepAtLeast(std::min(dim * sixteenths / 16, stored), plans)) continue;
    KVS_ASSIGN_OR_RETURN(packed, pack());
    if (fits()) return LimitedPack{std::move(packed)};
  }
  return LimitedPack{std::move(packed), false};
}

std::string DescribeLoss(const Plan& plan, Run tokens, double refused_loss, int32_t keep,
                         double loss) {
  return Refused(plan, tokens, refused_loss) + "; keep = " + std::to_string(keep) +
         " is taken there, which loses " + Digits(loss);
}

std::string DescribeRaw(const Plan& plan, Run tokens, const PackedInfo& mildest) {
  return Refused(plan, tokens, mildest.refused_loss) + "; all stored channels lose " +
         Digits(mildest.worst_loss) + ": these rows and what follows them stay raw" +
         (plan.packed.truncate ? "; truncate = false stores all channels" : "");
}

}  // namespace kvstrata
