// SPDX-License-Identifier: Apache-2.0
// What the first kernels of op vote leave to the second (vote_cuda.cu): weights of blocks of 64
// candidates, and maxima and sums of heads. Rows of keys or summaries have their first kernel in
// vote_cuda.cu, quantised keys theirs in vote_bits_cuda.cu.
#pragma once

#include <cmath>

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/row_scores.cuh"
#include "kernels/ops/vote/vote_cuda.h"

namespace kvstrata::cuda {

inline constexpr int kBlockRows = 64;  // candidates that share a maximum
inline constexpr int kWarps = 8;       // warps of a CTA of a first kernel
// exp() of a block's maximum as fp16; of a run, sums of 16 tokens at most.
inline constexpr int kLog2WeightScale = 15, kLog2RunScale = 11;
inline constexpr float kWeightScale = 1 << kLog2WeightScale;
inline constexpr float kLog2E = 1.4426950408889634f;

// A maximum and the sum of 2^(x - maximum).
struct Softmax {
  float max = -INFINITY, sum = 0;

  __device__ static float Shift(float max) { return max == -INFINITY ? 0.0f : max; }
  __device__ void Add(float other_max, float other_sum) {
    const float to = fmaxf(max, other_max), shift = Shift(to);
    sum = sum * Exp2(max - shift) + other_sum * Exp2(other_max - shift);
    max = to;
  }
};

// The scratch of a call. Blocks are numbered by position (candidate / 64), so that they lie in
// whole pages; a sequence has `blocks` slots from the block of its first candidate on.
struct Scratch {
  int blocks = 0, splits = 0;
  int run = 1;                 // candidates, of quantised keys, that have a weight together
  bool stays = false;          // in the L2 until the second kernel, if the rows do not push it out
  __half* weights = nullptr;   // [batch][blocks][query_heads][16 / run rows][4]
  float* block_max = nullptr;  // [batch][blocks][query_heads], of scores times log2(e)
  float2* heads = nullptr;     // [batch][splits][query_heads], maximum and sum

  __device__ __half* WeightsOf(int64_t sequence, int block, int query_heads, int head) const {
    return weights + ((sequence * blocks + block) * query_heads + head) * (kBlockRows / run);
  }
  __device__ float weight_scale() const { return run == 1 ? kWeightScale : 1 << kLog2RunScale; }
};

// The CTA's maximum and sum of each head from its warps', in order of the warps. totals: of this
// lane's two queries (LaneQuery), the same in all lanes of them.
__device__ inline void KeepTotals(const VoteBatch& w, const Scratch& scratch,
                                  const Softmax (&totals)[2], bool wide, int sequence,
                                  int first_head, int group) {
  __shared__ float2 warps[kWarps][8];
  const int lane = threadIdx.x % 32;
  if (lane < (wide ? 4 : 2)) {
    for (int i = 0; i < 2; ++i) {
      warps[threadIdx.x / 32][LaneQuery(lane, wide) + i] = {totals[i].max, totals[i].sum};
    }
  }
  __syncthreads();
  const int query = threadIdx.x;
  if (query >= group) return;
  Softmax all;
  for (int warp = 0; warp < kWarps; ++warp) all.Add(warps[warp][query].x, warps[warp][query].y);
  scratch.heads[(int64_t{sequence} * scratch.splits + blockIdx.x) * w.query_heads + first_head +
                query] = {all.max, all.sum};
}

// Over the lanes that hold a block's other candidates of the same queries.
template <typename Combine>
__device__ float AcrossRows(float x, bool wide, Combine combine) {
  if (!wide) x = combine(x, __shfl_xor_sync(~0u, x, 2));
  for (int step = 4; step < 32; step *= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// The first kernel, of quantised keys. Weights of a block are four candidates, or runs of them,
// that follow each other in each row. cudaErrorInvalidValue for a shape that it does not take.
int LaunchBitsWeights(const VoteBatch& work, const Scratch& scratch, Stream stream);

}  // namespace kvstrata::cuda
