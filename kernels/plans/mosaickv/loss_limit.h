// SPDX-License-Identifier: Apache-2.0
// What the plan's max_loss makes of strategies (codec packed): where they lose more, all heads keep
// more elements of a vector, step by step, as many of them as they need. Private to mosaickv.
//
// What is held against max_loss is PackedInfo.worst_loss: of the extent's rows the largest mean of
// |x - x^| / |x| over kLossRun tokens that follow each other, layers, KV heads, keys and values.
// Not the mean of all: what an answer hangs on are few tokens that are unlike the others, and
// rotations are made for the others. An extent that loses too much is packed again; one that does
// not, and plans with max_loss = 1, cost nothing.
#pragma once

#include <span>
#include <string>

#include "kernels/plans/mosaickv/segment_packer.h"

namespace kvstrata {

struct LimitedPack {
  PackedBytes packed;
  bool fits = true;  // false: no strategy keeps max_loss; `packed` is that of the mildest
};

// `range` packed with the strategies of `plans`, which become milder ones where they must. Errors
// as SegmentPacker::PackRange.
Result<LimitedPack> PackWithinLimit(const SegmentPacker& packer, const RecompressInput& input,
                                    const Geometry& geometry, const Plan& plan,
                                    const PackedRange& range, std::span<const double> recent,
                                    SegmentPlans* plans);

// What was asked and lost, and that `keep` elements of a vector were taken, which lose `loss`.
std::string DescribeLoss(const Plan& plan, Run tokens, double refused_loss, int32_t keep,
                         double loss);

// As DescribeLoss, where nothing was taken.
std::string DescribeRaw(const Plan& plan, Run tokens, const PackedInfo& mildest);

}  // namespace kvstrata
