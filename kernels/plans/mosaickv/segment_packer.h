// SPDX-License-Identifier: Apache-2.0
// SegmentPacker: finds what a segment is packed with, and packs rows with it.
//
// Implementations: host_packer.cc (rows and plans that the host can read, by a Backend's ops),
// cuda_packer.cc (those in a GPU's memory, where they lie, into an extent in that memory). One
// test holds the second to the first (tests/cuda/segment_packer_cuda_test.cc).
// Threads: any, several at once.
#pragma once

#include <span>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/plans/mosaickv/packed_layout.h"
#include "kernels/plans/mosaickv/strategy.h"

namespace kvstrata {

// Addresses where the packer reads.
struct HeadPlan {
  const float* r_k = nullptr;
  const float* r_v = nullptr;
  const float* eigenvalues = nullptr;
  Strategy strategy;
};

// Rotations and a strategy for each (layer, KV head). Movable; the pointers stay valid.
struct SegmentPlans {
  std::vector<HeadPlan> heads;                      // [layers][kv_heads]
  std::vector<float> storage;                       // plans that were found on the host, not read
  std::shared_ptr<const std::byte> device_storage;  // plans that were found on a GPU
};

// The plans that `extent` holds; valid as long as it is. REQUIRES: extent.has_rotations().
SegmentPlans PlansIn(const PackedExtent& extent);

// The strategies of `extent`, under the rotations that `plans` has.
void TakeStrategies(const PackedExtent& extent, SegmentPlans* plans);
bool SameStrategies(const PackedExtent& a, const PackedExtent& b);

// What is to be packed: `info` says where the segment and its plans are, and `info.loss` what the
// segment's rows before these have lost. A temporary extent is one flush.
struct PackedRange {
  Run tokens;
  bool final = false;
  PackedInfo info = {};
};

struct PackedBytes {
  std::vector<std::byte> bytes;  // as of an ExtentDraft
  DeviceBytes on_device = {};
  PackedInfo info = {};  // with `loss` up to the end of these rows
};

class SegmentPacker : public GpuPacker {
 public:
  // Whether it packs the raw rows of `tokens`, as they lie, by this plan.
  virtual bool Packs(const RecompressInput& input, const Geometry& geometry, const Plan& plan,
                     Run tokens) const = 0;

  // Eigenvectors of the covariances of all rows of `tokens`, and the strategy that goes with them.
  // The covariance is taken here, at once: an open segment's raw rows are all there, and sums kept
  // from flush to flush would weigh 2 * 8 * head_dim^2 bytes a head (67 MB for 32 layers of 8).
  // ABORTED when cancelled; FAILED_PRECONDITION when raw rows are missing.
  virtual Result<SegmentPlans> FindPlans(const RecompressInput& input, const Geometry& geometry,
                                         const Plan& plan, Run tokens) const = 0;

  // Errors as FindPlans. `recent`: the losses of the flushes before these rows, which closing by
  // drift averages over (temporary only).
  virtual Result<PackedBytes> PackRange(const RecompressInput& input, const Geometry& geometry,
                                        const Plan& plan, const SegmentPlans& plans,
                                        const PackedRange& range,
                                        std::span<const double> recent) const = 0;

  // Extents of one temporary segment that follow each other, as one; no row is packed again.
  virtual Result<PackedBytes> Join(const Geometry& geometry,
                                   std::span<const PackedExtent> extents) const = 0;
};

const SegmentPacker& HostPacker();

// Packed bytes of a token with its share of the block keys, all heads together, rounded up.
int64_t PackedBytesPerToken(const Geometry& geometry, const Plan& plan, const SegmentPlans& plans);

}  // namespace kvstrata
