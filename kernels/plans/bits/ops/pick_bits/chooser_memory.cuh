// SPDX-License-Identifier: Apache-2.0
// The shared memory of a CTA that chooses.
#pragma once

#include "kernels/ops/vote/vote_weights.cuh"
#include "kernels/plans/bits/ops/pick_bits/kept_tokens.cuh"
#include "kernels/plans/bits/ops/pick_bits/place_range.cuh"

namespace kvstrata::cuda {

inline constexpr int kStaged = 4096;      // tokens of a CTA that shared memory has room for
inline constexpr int kRanked = 128;       // places of the list that are ranked one against another
inline constexpr int kSplitsMost = 272;   // CTAs of a list that read codes
inline constexpr int kMarkWords = 32768;  // at most, of a CTA: a bit for each of its tokens
// fp16 weights, sums in another order: what a vote may be off by.
inline constexpr float kSafety = 2e-3f;
inline constexpr float kMostHalf = 65504;  // larger weights count as this

// Where a word of marks lies: a lane walks words that follow each other, and none between is used.
__host__ __device__ constexpr int MarkAt(int word) { return word + word / 32; }

struct ChooserMemory {
  Place staged[kStaged];
  ClusterBins bins[2];          // in turns: others may still read the ones before
  Place ranked[kRanked];        // places of this CTA; others read them
  int2 told;                    // this CTA's: places above the range, and in it; counted
  Place all_ranked[kRanked];    // places of the cluster
  int32_t taken[kClusterCtas];  // by each CTA
  int32_t ends[kSplitsMost];    // quads of all segments up to each
  int32_t sums[kWarps];
  float weights[8];  // what a head's kept weight counts in a vote
  float log_sum[8];  // exact
  float exact_of_estimate[8];
  bool huge[8];
  int32_t count;
  Place last;        // the last one that is chosen
  uint32_t marks[];  // bits of the CTA's tokens, at MarkAt
};

static_assert(sizeof(ChooserMemory) + 4 * MarkAt(kMarkWords) <= kSharedMost);

}  // namespace kvstrata::cuda
