// SPDX-License-Identifier: Apache-2.0
// The first kernel of op vote over quantised keys: weights of blocks of 64 candidates
// (bits_blocks.cuh).
#include <cstdint>

#include "kernels/ops/vote/bits_blocks.cuh"

namespace kvstrata::cuda {
namespace {

// What a warp keeps of its blocks for this lane's two queries. kWide: groups of more than 4 heads.
template <bool kWide>
class BlockKeeper {
 public:
  // factor: of log2(e) in it; > 0.
  __device__ BlockKeeper(const VoteBatch& w, const Scratch& scratch, int sequence, int first_head,
                         int group, const float (&factor)[2])
      : run_(scratch.run),
        block_weights_(kBlockRows / scratch.run),
        query_heads_(w.query_heads),
        factor_{factor[0], factor[1]} {
    const int lane = threadIdx.x % 32, query = LaneQuery(lane, kWide);
    const int row = lane / 4 + (!kWide && (lane & 2) != 0 ? 8 : 0), token = 4 * row;
    const int64_t cell = int64_t{sequence} * scratch.blocks * w.query_heads + first_head + query;
    weights_ = scratch.WeightsOf(sequence, 0, w.query_heads, first_head + query) + token / run_;
    block_max_ = scratch.block_max + cell;
    real_ = min(max(group - query, 0), 2);
    writes_ = token % run_ == 0 ? real_ : 0;
    first_row_ = row == 0;
  }

  // c: as of JoinColumns. base: what is to be added to it, joined as well. slot: the block's.
  __device__ void Keep(const float (&c)[kBlockTiles][2][4], const float (&base)[2], int slot) {
    __half* const weights = weights_ + int64_t{slot} * query_heads_ * block_weights_;
    float* const block_max = block_max_ + int64_t{slot} * query_heads_;
    float max[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      max[q] = Max(c[0], q);
      if constexpr (kWide) max[q] = fmaxf(max[q], Max(c[1], q));
    }
    OverLanes(max);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      max[q] = factor_[q] * (max[q] + base[q]);
      const float minus = fmaf(base[q], factor_[q], LogScale() - max[q]);
      __half* const out = weights + q * block_weights_;
      float sum = Weigh(c[0], q, minus, out);
      if constexpr (kWide) sum += Weigh(c[1], q, minus, out + block_weights_ / 2);
      Add(q, max[q], sum);
      if (q < real_ && first_row_) block_max[q] = max[q];
    }
  }

  // Over all lanes.
  __device__ void Totals(Softmax (&totals)[2]) const {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const float sum = AcrossRows(sum_[q], kWide, [](float a, float b) { return a + b; });
      totals[q].max = max_[q];
      totals[q].sum = sum / (run_ == 1 ? kWeightScale : 1 << kLog2RunScale);
    }
  }

 private:
  __device__ float LogScale() const { return run_ == 1 ? kLog2WeightScale : kLog2RunScale; }

  __device__ static float Max(const float (&c)[2][4], int q) {
    return fmaxf(fmaxf(c[0][q], c[0][2 + q]), fmaxf(c[1][q], c[1][2 + q]));
  }

  // Over the lanes that hold the block's other candidates. In groups up to 4 two lanes each take
  // one of their queries: five exchanges in place of eight.
  __device__ static void OverLanes(float (&max)[2]) {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    if constexpr (kWide) {
      for (float& of_query : max) of_query = AcrossRows(of_query, true, larger);
    } else {
      const bool second = (threadIdx.x & 2) != 0;
      const float theirs = __shfl_xor_sync(~0u, second ? max[0] : max[1], 2);
      const float own = AcrossRows(fmaxf(second ? max[1] : max[0], theirs), true, larger);
      const float other = __shfl_xor_sync(~0u, own, 2);
      max[0] = second ? other : own;
      max[1] = second ? own : other;
    }
  }

  // Writes the weights of the lane's four tokens, or of the run that they are in; returns their
  // sum. The tokens of a run are those of lanes side by side.
  __device__ float Weigh(const float (&c)[2][4], int q, float minus, __half* out) const {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = Exp2(fmaf(c[i / 2][2 * (i % 2) + q], factor_[q], minus));
    const float sum = p[0] + p[1] + (p[2] + p[3]);
    if (run_ > 1) {
      float of_run = sum;
      if (run_ > 4) of_run += __shfl_xor_sync(~0u, of_run, 4);
      if (run_ > 8) of_run += __shfl_xor_sync(~0u, of_run, 8);
      if (q < writes_) *out = __float2half_rn(of_run);
    } else if (q < writes_) {
      const __half2 low = __floats2half2_rn(p[0], p[1]), high = __floats2half2_rn(p[2], p[3]);
      *reinterpret_cast<uint2*>(out) = {BitsOf(low), BitsOf(high)};
    }
    return sum;
  }

  // All lanes of a query have the same maxima, and each the sums of its own tokens.
  __device__ void Add(int q, float max, float sum) {
    const float to = fmaxf(max_[q], max);
    sum_[q] = sum_[q] * Exp2(max_[q] - to) + sum * Exp2(max - to);
    max_[q] = to;
  }

  const int run_, block_weights_, query_heads_;
  const float factor_[2];
  __half* weights_;   // this lane's of its first query, in the first slot
  float* block_max_;  // its first query's, likewise
  int real_;          // queries that there are, of its two
  int writes_;        // queries whose weights it writes
  bool first_row_;    // whether it writes maxima
  float max_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

// Grid (splits, kv_heads, batch). Warps take turns (BlockWalk) over all CTAs: what is read at one
// time lies side by side. kWhole: groups are of whole blocks.
template <int kDim, int kBits, bool kWide, bool kWhole>
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
  BlockCopier<kDim, kBits, AllTurns, kWhole> copier(
      w.groups, f, turns, sequence, head,
      BlockWalk<AllTurns, kWhole>(turns, AllTurns{begin / (turns.group_tokens * turns.groups)},
                                  begin, end),
      units.last, ring);
  BlockScorer<kDim, kBits, AllTurns, kWhole> scorer(f, ring, &copier);
  if (w.ahead) WaitForPrevious();
  const auto query = LaneQueryPairs<kDim, kBits>::Load(
      w.q, w.q_dtype, w.QueriesAt(sequence) + head * group * kDim, group);
  float factor[2];
  query.Factors(w.scale * kLog2E, factor);

  BlockKeeper<kWide> keeper(w, scratch, sequence, head * group, group, factor);
  while (true) {
    float c[kBlockTiles][2][4];
    const int token = scorer.Next(query, kWide ? 8 : 4, end, c);
    if (token >= end) break;
    if (token < units.first || token + kBlockRows > units.last) Mask(c, token, units);
    if constexpr (!kWide) JoinColumns(c);
    float base[2] = {};
    if constexpr (kWhole) scorer.template JoinBase<kWide>(base);
    keeper.Keep(c, base, (token - begin) / kBlockRows);
  }
  Softmax totals[2];
  keeper.Totals(totals);
  KeepTotals(w, scratch, totals, kWide, sequence, head * group, group);
}

template <int kDim, int kBits, bool kWide, bool kWhole>
int LaunchOf(const VoteBatch& w, const Scratch& scratch, Stream stream) {
  constexpr int kBytes = kWarps * static_cast<int>(sizeof(BitsRing<kDim, kBits>));
  const auto kernel = WeightBitsKernel<kDim, kBits, kWide, kWhole>;
  if (const int error = AllowShared(kernel, kBytes); error != 0) return error;
  const dim3 grid(scratch.splits, w.groups.kv_heads, w.batch);
  return LaunchDependent(kernel, grid, kWarps * 32, kBytes, stream, w,
                         GroupOffsets::Of(w.groups.format), Turns::Of(w.groups), scratch);
}

template <int kDim, int kBits>
int Launch(const VoteBatch& w, const Scratch& scratch, Stream stream) {
  const bool wide = w.query_heads > 4 * w.groups.kv_heads;
  if (w.groups.format.tokens % kBlockRows != 0) {
    return wide ? LaunchOf<kDim, kBits, true, false>(w, scratch, stream)
                : LaunchOf<kDim, kBits, false, false>(w, scratch, stream);
  }
  return wide ? LaunchOf<kDim, kBits, true, true>(w, scratch, stream)
              : LaunchOf<kDim, kBits, false, true>(w, scratch, stream);
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
