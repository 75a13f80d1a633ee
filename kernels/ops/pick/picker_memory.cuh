// SPDX-License-Identifier: Apache-2.0
// The shared memory of a CTA of op pick.
#pragma once

#include <cstdint>

#include "kernels/ops/pick/boundary.cuh"

namespace kvstrata::cuda {

inline constexpr int kPickWarpsMax = 32;
inline constexpr int kPickCtasMax = 128;  // CTAs of a list
inline constexpr int kClusterCtas = 8;    // CTAs of a cluster; so many every device can have
inline constexpr int kPickCandidates = 8192;
inline constexpr int kGroups = kBins / 64;

// Each pass has its own histogram and each count its own place, so that few barriers are needed.
struct PickerMemory {
  uint32_t candidates[kPickCandidates];
  int32_t histogram[kPasses][kBins];
  // Sums over groups of a histogram's bins, from the largest digits down; of 128 bins in a
  // FindDigit of one CTA.
  int32_t group_sums[kPasses][kGroups];
  Digit found[kPasses];
  int32_t offsets[kPickCtasMax + 1];  // where each CTA's candidates begin
  int32_t above_before;               // keys above the range in the CTAs before
  int2 counts_of_cta;                 // above the range and within it; others of a cluster read it
  int2 warp_counts[3][kPickWarpsMax];
  alignas(16) uint32_t keys[];  // as many as the launch has room for
};

}  // namespace kvstrata::cuda
