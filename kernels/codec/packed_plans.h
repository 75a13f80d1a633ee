// What a segment is packed with: rotations and a strategy for each (layer, KV head), found from its
// raw rows or read from an extent. Private to kernels/codec.
#ifndef KVSTRATA_KERNELS_CODEC_PACKED_PLANS_H_
#define KVSTRATA_KERNELS_CODEC_PACKED_PLANS_H_

#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/codec/packed_layout.h"
#include "kernels/codec/strategy.h"

namespace kvstrata {

struct HeadPlan {
  const float* r_k = nullptr;
  const float* r_v = nullptr;
  const float* eigenvalues = nullptr;
  Strategy strategy;
};

// Movable; the pointers stay valid.
struct SegmentPlans {
  std::vector<HeadPlan> heads;  // [layers][kv_heads]
  std::vector<float> storage;   // of plans that were found, not read
};

// Eigenvectors of the covariances of all rows of `tokens`, and the strategy that goes with them.
// The covariance is taken here, at once: an open segment's raw rows are all there, and sums kept
// from flush to flush would weigh 2 * 8 * head_dim^2 bytes a head (67 MB for 32 layers of 8).
// ABORTED when cancelled; FAILED_PRECONDITION when raw rows are missing.
Result<SegmentPlans> FindPlans(const RecompressInput& input, const Geometry& geometry,
                               const Plan& plan, Run tokens);

// Those that `extent` holds; valid as long as it is. REQUIRES: extent.has_rotations().
SegmentPlans PlansIn(const PackedExtent& extent);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_CODEC_PACKED_PLANS_H_
