// SPDX-License-Identifier: Apache-2.0
// The first kernel of op vote over quantised keys: weights of blocks of 64 candidates
// (bits_blocks.cuh).
#include <algorithm>
#include <cstdint>

#include "kernels/ops/vote/bits_blocks.cuh"

namespace kvstrata::cuda {
namespace {

// What a warp keeps of its blocks for this lane's two queries.
class BlockKeeper {
 public:
  // factor: of log2(e) in it; > 0.
  __device__ BlockKeeper(const VoteBatch& w, const Scratch& scratch, int sequence, int first_head,
                         int group, const float (&factor)[2])
      : query_heads_(w.query_heads),
        run_(scratch.run),
        wide_(group > 4),
        factor_{factor[0], factor[1]} {
    const int lane = threadIdx.x % 32, query = LaneQuery(lane, wide_);
    const int64_t cell = int64_t{sequence} * scratch.blocks * w.query_heads + first_head + query;
    row_ = lane / 4 + (!wide_ && (lane & 2) != 0 ? 8 : 0);
    weights_ = scratch.WeightsOf(sequence, 0, w.query_heads, first_head + query);
    block_max_ = scratch.block_max + cell;
    real_ = min(max(group - query, 0), 2);
  }

  // c: as of JoinColumns. slot: the block's.
  __device__ void Keep(const float (&c)[kBlockTiles][2][4], int slot) {
    const int block_weights = kBlockRows / run_;
    __half* const weights = weights_ + int64_t{slot} * query_heads_ * block_weights;
    float* const block_max = block_max_ + int64_t{slot} * query_heads_;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      float max = Max(c[0], q);
      if (wide_) max = fmaxf(max, Max(c[1], q));
      max = factor_[q] * AcrossRows(max, wide_, [](float a, float b) { return fmaxf(a, b); });
      const float shift = max - (run_ == 1 ? kLog2WeightScale : kLog2RunScale);
      __half* const out = weights + q * block_weights;
      float sum = Weigh(c[0], q, shift, row_, out);
      if (wide_) sum += Weigh(c[1], q, shift, row_ + 8, out);
      Add(q, max, sum);
      if (q < real_ && row_ == 0) block_max[q] = max;
    }
  }

  // Over all lanes.
  __device__ void Totals(Softmax (&totals)[2]) const {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const float sum = AcrossRows(sum_[q], wide_, [](float a, float b) { return a + b; });
      totals[q].max = max_[q];
      totals[q].sum = sum / (run_ == 1 ? kWeightScale : 1 << kLog2RunScale);
    }
  }

 private:
  __device__ static float Max(const float (&c)[2][4], int q) {
    return fmaxf(fmaxf(c[0][q], c[0][2 + q]), fmaxf(c[1][q], c[1][2 + q]));
  }

  // Writes the weights of four tokens, a row's, or of their run; returns their sum. out: the
  // block's.
  __device__ float Weigh(const float (&c)[2][4], int q, float shift, int row, __half* out) const {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = Exp2(fmaf(c[i / 2][2 * (i % 2) + q], factor_[q], -shift));
    const float sum = p[0] + p[1] + (p[2] + p[3]);
    if (run_ > 1) {
      WriteRun(sum, q, row, out);
    } else if (q < real_) {
      const __half2 low = __floats2half2_rn(p[0], p[1]), high = __floats2half2_rn(p[2], p[3]);
      reinterpret_cast<uint2*>(out)[row] = {BitsOf(low), BitsOf(high)};
    }
    return sum;
  }

  // sum: of this row's four tokens. The rows of a run lie in lanes side by side.
  __device__ void WriteRun(float sum, int q, int row, __half* out) const {
    const int rows = run_ / 4;
    if (rows > 1) sum += __shfl_xor_sync(~0u, sum, 4);
    if (rows > 2) sum += __shfl_xor_sync(~0u, sum, 8);
    if (q < real_ && row % rows == 0) out[row / rows] = __float2half_rn(sum);
  }

  // All lanes of a query have the same maxima, and each the sums of its own tokens.
  __device__ void Add(int q, float max, float sum) {
    const float to = fmaxf(max_[q], max);
    sum_[q] = sum_[q] * Exp2(max_[q] - to) + sum * Exp2(max - to);
    max_[q] = to;
  }

  const int query_heads_, run_;
  const bool wide_;
  const float factor_[2];
  __half* weights_;   // those of this lane's first query, in the first slot
  float* block_max_;  // likewise
  int row_;           // row of the lane's first four tokens
  int real_;          // how many of its two queries there are
  float max_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

// Grid (splits, kv_heads, batch). Warps take turns (BlockWalk) over all CTAs: what is read at one
// time lies side by side.
template <int kDim, int kBits>
__global__ __launch_bounds__(kWarps * 32, kDim == 256 ? 1 : 2) void WeightBitsKernel(
    const __grid_constant__ VoteBatch w, const __grid_constant__ GroupOffsets f,
    const __grid_constant__ Turns turns, const Scratch scratch) {
  extern __shared__ uint4 dynamic[];
  auto* rings = reinterpret_cast<BitsRing<kDim, kBits>*>(dynamic);
  const int head = blockIdx.y, sequence = blockIdx.z;
  const int group = w.query_heads / w.groups.kv_heads;
  LetNextStart();
  if (!w.ahead) WaitForPrevious();
  const Candidates units = CandidateTokensOf(w.rule, w.tokens[sequence]);
  if (units.full) {
    if (w.ahead) WaitForPrevious();
    return;
  }

  const int begin = units.first / kBlockRows * kBlockRows;
  const int end = (units.last + kBlockRows - 1) / kBlockRows * kBlockRows;
  auto* const ring = &rings[threadIdx.x / 32];
  BlockCopier<kDim, kBits> copier(
      w.groups, f, turns, sequence, head,
      BlockWalk(turns, AllTurns{begin / (turns.group_tokens * turns.groups)}, begin, end),
      units.last, ring);
  BlockScorer<kDim, kBits> scorer(f, ring, &copier);
  if (w.ahead) WaitForPrevious();
  const auto query = LaneQueryPairs<kDim, kBits>::Load(
      w.q, w.q_dtype, w.QueriesAt(sequence) + head * group * kDim, group);
  float factor[2];
  query.Factors(w.scale * kLog2E, factor);

  BlockKeeper keeper(w, scratch, sequence, head * group, group, factor);
  while (true) {
    float c[kBlockTiles][2][4];
    const int token = scorer.Next(query, group, end, c);
    if (token >= end) break;
    if (token < units.first || token + kBlockRows > units.last) Mask(c, token, units);
    if (group <= 4) JoinColumns(c);
    keeper.Keep(c, (token - begin) / kBlockRows);
  }
  Softmax totals[2];
  keeper.Totals(totals);
  KeepTotals(w, scratch, totals, group > 4, sequence, head * group, group);
}

template <int kDim, int kBits>
int Launch(const VoteBatch& w, const Scratch& scratch, Stream stream) {
  constexpr int kBytes = kWarps * static_cast<int>(sizeof(BitsRing<kDim, kBits>));
  if (const int error = AllowShared(WeightBitsKernel<kDim, kBits>, kBytes); error != 0) {
    return error;
  }
  const dim3 grid(scratch.splits, w.groups.kv_heads, w.batch);
  return LaunchDependent(WeightBitsKernel<kDim, kBits>, grid, kWarps * 32, kBytes, stream, w,
                         GroupOffsets::Of(w.groups.format), Turns::Of(w.groups), scratch);
}

template <int kDim>
int LaunchBits(const VoteBatch& w, const Scratch& scratch, Stream stream) {
  switch (w.groups.format.bits) {
    case 2:
      return Launch<kDim, 2>(w, scratch, stream);
    case 3:
      return Launch<kDim, 3>(w, scratch, stream);
    default:
      return Launch<kDim, 4>(w, scratch, stream);
  }
}

}  // namespace

int LaunchBitsWeights(const VoteBatch& w, const Scratch& scratch, Stream stream) {
  const QuantisedGroup& f = w.groups.format;
  if (!f.IsValid() || f.tokens % kTileTokens != 0 || w.groups.block_groups < 1 ||
      w.rule.recent_tokens < f.tokens) {
    return cudaErrorInvalidValue;
  }
  switch (f.dim) {
    case 64:
      return LaunchBits<64>(w, scratch, stream);
    case 128:
      return LaunchBits<128>(w, scratch, stream);
    default:
      return LaunchBits<256>(w, scratch, stream);
  }
}

}  // namespace kvstrata::cuda
