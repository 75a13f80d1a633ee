// SPDX-License-Identifier: Apache-2.0
// Op cascade on the GPU (contract: cascade.h).
//
// Three kernels. Cost: reads every row of the index once (1.56 % of the keys' and values' bytes at
// pages of 32 tokens), then one CTA a sequence goes five times over a level's scores. Sums in fp32:
// near-ties may fall otherwise than on the CPU, which adds heads up in double.
#pragma once

#include "kernels/plans/chess/ops/cascade/cascade.h"

namespace kvstrata::cuda {

// Scores of a sequence: pages, chunks, grids, filling ones included, in multiples of 16.
inline int64_t CascadeUnits(int32_t pages_max) {
  return (int64_t{3} * pages_max + 2 + 15) / 16 * 16;
}
// Where in a sequence's scratch its scores lie, as fp32, level by level: behind the anchor and the
// vectors of filling units. channels: layers * kv_heads * head_dim.
inline int64_t CascadeScoresAt(int64_t channels) {
  constexpr int64_t kAnchor = 4, kFilling = 2 * 2;
  return channels * (kAnchor + kFilling);
}
// Bytes for one sequence.
inline int64_t CascadeScratchBytes(int64_t channels, int32_t pages_max) {
  constexpr int64_t kScore = 4, kKept = 1;
  return CascadeScoresAt(channels) + CascadeUnits(pages_max) * (kScore + kKept);
}

// cudaErrorInvalidValue for a shape that it does not take.
int CascadeCuda(const CascadeBatch& work, Stream stream);

}  // namespace kvstrata::cuda
