// SPDX-License-Identifier: Apache-2.0
// Tokens in the order in which they are chosen, and where the last one that is chosen lies.
#pragma once

#include <cstdint>

#include "kernels/plans/bits/ops/pick_bits/cluster_bins.cuh"

namespace kvstrata::cuda {

// A token and its vote as one number: the larger is chosen first.
using Place = uint64_t;
__device__ inline Place PlaceOf(float vote, int token) {
  return uint64_t{__float_as_uint(vote)} << 32 | static_cast<uint32_t>(~token);
}
__device__ inline float VoteOf(Place x) { return __uint_as_float(static_cast<uint32_t>(x >> 32)); }
__device__ inline int TokenOf(Place x) { return static_cast<int>(~static_cast<uint32_t>(x)); }

// The places that the one looked for is among, as places less the floor's: [low, low + 2^width).
struct PlaceRange {
  // Digits are of ten bits, but for the first one: an octave of votes is 256 digits, and what is
  // four octaves above the floor or more has the last one. (The cut lies an octave or two below
  // the last vote that is chosen.)
  static constexpr int kAll = 64, kFirstShift = 32 + 15;
  Place low = 0;
  int width = kAll;

  __device__ int shift() const { return width == kAll ? kFirstShift : max(width - 10, 0); }
  // REQUIRES: narrowed.
  __device__ bool Holds(Place x) const { return x >= low && (x - low) >> width == 0; }
  __device__ int DigitOf(Place x) const {
    return static_cast<int>(min((x - low) >> shift(), Place{ClusterBins::kCount - 1}));
  }
  __device__ PlaceRange Narrowed(uint32_t digit) const {
    const bool open = width == kAll && digit == ClusterBins::kCount - 1;  // no vote has a sign
    return {low + (Place{digit} << shift()), open ? kAll - 1 : shift()};
  }
};

}  // namespace kvstrata::cuda
