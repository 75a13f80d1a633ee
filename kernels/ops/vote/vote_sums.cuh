// Votes of blocks of 64 candidates from their weights (vote_weights.cuh): a thread sums four of
// them, in the same order everywhere, so that a vote has the same bits whoever sums it.
#ifndef KVSTRATA_KERNELS_OPS_VOTE_VOTE_SUMS_CUH_
#define KVSTRATA_KERNELS_OPS_VOTE_VOTE_SUMS_CUH_

#include "kernels/ops/vote/vote_weights.cuh"

namespace kvstrata::cuda {

inline constexpr int kSumWarps = 4;               // of a CTA of the second kernel
inline constexpr int kSumBlocks = 2 * kSumWarps;  // blocks that it sums
inline constexpr int kSumCtas = 660;              // of one wave, five on each of 132 SMs

// Maximum (0 for -inf) and 1 / sum of each of `heads` heads over all splits, in a fixed order: by
// the whole CTA of the second kernel, with a barrier at the end.
__device__ inline void HeadTotals(const Scratch& scratch, int64_t sequence, int query_heads,
                                  int first, int heads, float2* out) {
  __shared__ float2 parts[kSumWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int head = lane; head - lane < heads; head += 32) {
    const float2* from = scratch.heads + sequence * scratch.splits * query_heads + first + head;
    Softmax all;
#pragma unroll 4
    for (int split = warp; split < scratch.splits; split += kSumWarps) {
      const float2 part = head < heads ? from[int64_t{split} * query_heads] : float2{-INFINITY, 0};
      all.Add(part.x, part.y);
    }
    parts[warp][lane] = {all.max, all.sum};
    __syncthreads();
    if (warp == 0 && head < heads) {
      Softmax total;
      for (int i = 0; i < kSumWarps; ++i) total.Add(parts[i][lane].x, parts[i][lane].y);
      const float inverse = total.sum == 0 ? 0.0f : 1.0f / (total.sum * kWeightScale);
      out[head] = {Softmax::Shift(total.max), inverse};
    }
    __syncthreads();
  }
}

// A thread's share of a block: four candidates.
struct RowVotes {
  float at[4] = {};
};

// The sum over the heads, in order. weights: this thread's row of the block's first head that
// counts; block_max: of that head.
template <int kHeadsAtOnce>
__device__ RowVotes SumHeads(const uint2* weights, const float* block_max, const float2* totals,
                             int heads) {
  constexpr int kRows = kBlockRows / 4;
  RowVotes votes;
  for (int first = 0; first < heads; first += kHeadsAtOnce) {
    // All loads before the first use of one.
    uint2 bits[kHeadsAtOnce];
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (first + h < heads) bits[h] = weights[(first + h) * kRows];
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (first + h >= heads) continue;
      const float2 total = totals[first + h];
      const float weight = Exp2(block_max[first + h] - total.x) * total.y;
      const float2 low = __half22float2(reinterpret_cast<const __half2&>(bits[h].x));
      const float2 high = __half22float2(reinterpret_cast<const __half2&>(bits[h].y));
      votes.at[0] = fmaf(weight, low.x, votes.at[0]);
      votes.at[1] = fmaf(weight, low.y, votes.at[1]);
      votes.at[2] = fmaf(weight, high.x, votes.at[2]);
      votes.at[3] = fmaf(weight, high.y, votes.at[3]);
    }
  }
  return votes;
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_VOTE_VOTE_SUMS_CUH_
