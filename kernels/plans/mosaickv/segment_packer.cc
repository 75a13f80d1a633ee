// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/segment_packer.h"

#include <algorithm>

namespace kvstrata {
namespace {

Strategy StrategyOf(const PackedHead& h) { return {h.keys.keep, h.keys.neighbours, h.block}; }

}  // namespace

SegmentPlans PlansIn(const PackedExtent& extent) {
  SegmentPlans plans;
  for (const PackedHead& h : extent.heads) {
    plans.heads.push_back({h.r_k, h.r_v, h.eigenvalues, StrategyOf(h)});
  }
  return plans;
}

void TakeStrategies(const PackedExtent& extent, SegmentPlans* plans) {
  for (size_t h = 0; h < extent.heads.size(); ++h) {
    plans->heads[h].strategy = StrategyOf(extent.heads[h]);
  }
}

bool SameStrategies(const PackedExtent& a, const PackedExtent& b) {
  return std::ranges::equal(a.heads, b.heads, {}, StrategyOf, StrategyOf);
}

int64_t PackedBytesPerToken(const Geometry& geometry, const Plan& plan, const SegmentPlans& plans) {
  int64_t bytes = 0;
  for (const HeadPlan& h : plans.heads) {
    const int64_t stride = PackedFormat(geometry.head_dim, h.strategy.keep, h.strategy.neighbours,
                                        plan.packed.truncate)
                               .stride;
    bytes += 2 * stride + (stride + h.strategy.block - 1) / h.strategy.block;
  }
  return bytes;
}

}  // namespace kvstrata
