// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/row_scores.cuh"
#include "kernels/ops/always/always.h"
#include "kernels/ops/reuse/reuse.cuh"
#include "kernels/ops/vote/vote_weights.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kTileRows = 16;
constexpr int kTiles = 4;      // tiles of a block
constexpr int kSumWarps = 4;   // warps of a CTA of the second kernel
constexpr int kHeadTile = 32;  // heads that it sums at a time
constexpr int kSumCtasOfSm = 5;
// Weights up to here are kept in the L2: 4 % less time at 128K tokens; with 64 MB of them, as at
// 1M, 0.6 % more.
constexpr int64_t kStaysBytes = int64_t{24} << 20;

// What a lane holds of a block: its two queries, in 4 tiles, of one row (groups up to 4) or two.
struct BlockScores {
  float x[kTiles][2][2];  // [tile][row g, row g + 8][query]
};

// The scores of a lane's rows of a tile that count, times `scale`; -inf for the others.
__device__ void KeepTile(const LaneScores& s, bool wide, int row, Candidates units, float scale,
                         float (&out)[2][2]) {
  const int lane = threadIdx.x % 32, first_row = row + lane / 4, second_row = first_row + 8;
  const bool first_counts = first_row >= units.first && first_row < units.last;
  const bool second_counts = second_row >= units.first && second_row < units.last;
  // In groups up to 4, lanes t and t + 2 hold the same scores: one takes row g, one row g + 8.
  const bool take_second = !wide && (lane & 2) != 0;
  for (int i = 0; i < 2; ++i) {
    const float x = take_second ? s.row_g8[i] : s.row_g[i];
    out[0][i] = (take_second ? second_counts : first_counts) ? x * scale : -INFINITY;
    out[1][i] = second_counts && wide ? s.row_g8[i] * scale : -INFINITY;
  }
}

__device__ float BlockMax(const BlockScores& s, int query, bool wide) {
  float max = -INFINITY;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    max = fmaxf(max, fmaxf(s.x[tile][0][query], s.x[tile][1][query]));
  }
  return AcrossRows(max, wide, [](float a, float b) { return fmaxf(a, b); });
}

// Four weights of one row of a head, tile by tile, in 8 bytes; returns their sum.
__device__ float WriteWeights(const BlockScores& s, int half, int query, float shift, uint2* out) {
  float p[kTiles], sum = 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    p[tile] = Exp2(s.x[tile][half][query] - shift);
    sum += p[tile];
    p[tile] *= kWeightScale;
  }
  if (out != nullptr) {
    *out = {PackedPair(Rounded<__half>(p[0]), Rounded<__half>(p[1])),
            PackedPair(Rounded<__half>(p[2]), Rounded<__half>(p[3]))};
  }
  return sum;
}

// Writes the block's weights and maxima for this lane's queries; adds them to `totals`.
__device__ void KeepBlock(const VoteBatch& w, const Scratch& scratch, const BlockScores& s,
                          bool wide, int sequence, int slot, int first_head, int group,
                          Softmax (&totals)[2]) {
  const int lane = threadIdx.x % 32, first = LaneQuery(lane, wide);
  const int row = lane / 4 + (!wide && (lane & 2) != 0 ? 8 : 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool real = first + i < group;
    const float max = BlockMax(s, i, wide), shift = Softmax::Shift(max);
    auto* out = reinterpret_cast<uint2*>(
        scratch.WeightsOf(sequence, slot, w.query_heads, first_head + first + i));
    float sum = WriteWeights(s, 0, i, shift, real ? out + row : nullptr);
    if (wide) sum += WriteWeights(s, 1, i, shift, real ? out + row + 8 : nullptr);
    sum = AcrossRows(sum, wide, [](float a, float b) { return a + b; });
    totals[i].Add(max, sum);
    if (real && row == 0) {
      scratch.block_max[(int64_t{sequence} * scratch.blocks + slot) * w.query_heads + first_head +
                        first + i] = max;
    }
  }
}

// The tokens of a sequence; kNoQuery where a cached selection serves its query. For all threads.
__device__ int32_t VotingTokens(const VoteBatch& w, int sequence) {
  if (w.reuse.caches == nullptr) {
    WaitForPrevious();
    LetNextStart();
    return w.tokens[sequence];
  }
  if (!w.reuse.ahead) WaitForPrevious();
  const SequenceQuery query{w.q, w.q_dtype, w.QueriesAt(sequence), w.query_heads, w.rows.head_dim};
  PickCache<kWarps * 32> cache(w.reuse, w.rule, sequence, query);
  WaitForPrevious();
  LetNextStart();
  // The last CTA of a head has the fewest blocks.
  return cache.Decide(blockIdx.x == gridDim.x - 1 && blockIdx.y == 0);
}

template <int kDim>
struct Shared {
  QueryFragments<kDim> queries;
  RowRing<kDim> rings[kWarps];
};

// Grid (splits, kv_heads, batch). Warps take blocks in turn, over all CTAs: what is read at one
// time lies side by side (work_share.cuh says why).
template <typename T, int kDim, bool kDeviation>
__global__ __launch_bounds__(kWarps * 32, 2) void WeightKernel(const __grid_constant__ VoteBatch w,
                                                               const Scratch scratch) {
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<Shared<kDim>*>(dynamic);
  const int head = blockIdx.y, sequence = blockIdx.z;
  const int group = w.query_heads / w.rows.kv_heads;
  const bool wide = group > 4;
  const int32_t tokens = VotingTokens(w, sequence);
  if (tokens == kNoQuery) return;
  const Candidates units = CandidatesOf(w.rule, tokens);
  if (units.full) return;

  const int first_block = units.first / kBlockRows;
  const int count = (units.last + kBlockRows - 1) / kBlockRows - first_block;
  const int step = static_cast<int>(gridDim.x) * kWarps;
  const int begin = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int blocks = max(0, (count - begin + step - 1) / step);
  const auto row_of = [=](int tile) {
    return (first_block + begin + tile / kTiles * step) * kBlockRows + tile % kTiles * kTileRows;
  };
  TileScorer<T, kDim, kDeviation, decltype(row_of)> scorer(
      w.rows, w.fields, w.field_stride, sequence, head, units.first, units.last, blocks * kTiles,
      row_of, shared.queries, wide, &shared.rings[threadIdx.x / 32], scratch.stays);
  LoadQueries<T, kDeviation>(&shared.queries, w.q, w.q_dtype,
                             w.QueriesAt(sequence) + head * group * kDim, group, w.fields);
  __syncthreads();

  Softmax totals[2];
  for (int i = 0; i < blocks; ++i) {
    BlockScores s;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      KeepTile(scorer.Next(), wide, row_of(i * kTiles + tile), units, w.scale * kLog2E, s.x[tile]);
    }
    KeepBlock(w, scratch, s, wide, sequence, begin + i * step, head * group, group, totals);
  }
  KeepTotals(w, scratch, totals, wide, sequence, head * group, group);
}

__device__ void AddAlways(const float* of_head, Softmax* total) {
  total->sum *= of_head[2];
  total->Add(of_head[0], of_head[1]);
}

// Maximum (0 for -inf) and 1 / sum of each of `heads` heads over all splits, in a fixed order: by
// the whole CTA of the second kernel, with a barrier at the end.
__device__ void HeadTotals(const Scratch& scratch, const float* always, int64_t sequence,
                           int query_heads, int first, int heads, float2* out) {
  __shared__ float2 parts[kSumWarps][kHeadTile];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int head = lane; head - lane < heads; head += kHeadTile) {
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
      if (always != nullptr) {
        AddAlways(always + (sequence * query_heads + first + head) * kAlwaysFloats, &total);
      }
      const float inverse = total.sum == 0 ? 0.0f : 1.0f / (total.sum * scratch.weight_scale());
      out[head] = {Softmax::Shift(total.max), inverse};
    }
    __syncthreads();
  }
}

// A thread's share of a block: four weights.
struct RowVotes {
  float at[kTiles] = {};
};

// Which candidates of their block the four weights of a row are of; of a run, the first.
struct RowOfTiles {  // one row of each tile
  __device__ static Candidates CandidatesAt(const VoteBatch& w, int sequence) {
    return CandidatesOf(w.rule, w.tokens[sequence]);
  }
  __device__ static int Candidate(int row, int i, int) { return i * kTileRows + row; }
};
struct RowOfFour {  // that follow each other (vote_bits_cuda.cu)
  __device__ static Candidates CandidatesAt(const VoteBatch& w, int sequence) {
    return CandidateTokensOf(w.rule, w.tokens[sequence]);
  }
  __device__ static int Candidate(int row, int i, int run) { return (4 * row + i) * run; }
};

// The sum over the heads, in order. weights, block_max: of the block's first head that counts;
// rows: of a block.
__device__ RowVotes SumHeads(const uint2* weights, const float* block_max, const float2* totals,
                             int heads, int rows) {
  RowVotes votes;
  for (int tile = 0; tile < heads; tile += kHeadTile) {
    // All loads of the tile before the first use of one.
    uint2 bits[kHeadTile];
#pragma unroll
    for (int h = 0; h < kHeadTile; ++h) {
      if (tile + h < heads) bits[h] = weights[(tile + h) * rows];
    }
#pragma unroll
    for (int h = 0; h < kHeadTile; ++h) {
      if (tile + h >= heads) continue;
      const float2 total = totals[tile + h];
      const float weight = Exp2(block_max[tile + h] - total.x) * total.y;
      const float2 low = __half22float2(reinterpret_cast<const __half2&>(bits[h].x));
      const float2 high = __half22float2(reinterpret_cast<const __half2&>(bits[h].y));
      votes.at[0] += weight * low.x;
      votes.at[1] += weight * low.y;
      votes.at[2] += weight * high.x;
      votes.at[3] += weight * high.y;
    }
  }
  return votes;
}

// Grid (CTAs, output_rows, batch), the CTAs of a list taking blocks in turn, a thread a row. kRuns:
// weights are those of runs. Without, nothing is divided.
template <typename Row, bool kRuns>
__global__ __launch_bounds__(kSumWarps * 32, kSumCtasOfSm) void VoteKernel(VoteBatch w,
                                                                           Scratch scratch) {
  extern __shared__ float2 totals[];
  WaitForPrevious();
  LetNextStart();
  const Candidates units = Row::CandidatesAt(w, blockIdx.z);
  if (units.full) return;
  const int first_block = units.first / kBlockRows;
  const int count = (units.last + kBlockRows - 1) / kBlockRows - first_block;
  const int run = kRuns ? scratch.run : 1, rows = kTileRows / run;
  const int64_t sequence = blockIdx.z;
  const int heads = w.query_heads / w.output_rows, first_head = heads * blockIdx.y;
  const int row = threadIdx.x % rows, blocks = kSumWarps * 32 / rows;
  float* out = w.votes + (sequence * w.output_rows + blockIdx.y) * (w.candidate_stride / run);
  HeadTotals(scratch, w.always, sequence, w.query_heads, first_head, heads, totals);
  const int step = static_cast<int>(gridDim.x) * blocks;
  int slot = static_cast<int>(blockIdx.x) * blocks + static_cast<int>(threadIdx.x) / rows;
  for (; slot < count; slot += step) {
    const int64_t cell = (sequence * scratch.blocks + slot) * w.query_heads + first_head;
    const auto* weights = reinterpret_cast<const uint2*>(
                              scratch.WeightsOf(sequence, slot, w.query_heads, first_head)) +
                          row;
    const RowVotes votes = SumHeads(weights, scratch.block_max + cell, totals, heads, rows);
    for (int i = 0; i < kTiles; ++i) {
      const int unit = (first_block + slot) * kBlockRows + Row::Candidate(row, i, run);
      if (unit >= units.first && unit < units.last) out[(unit - units.first) / run] = votes.at[i];
    }
  }
}

// Bytes of a call's scratch, and where its parts begin. REQUIRES: a valid shape.
struct ScratchShape {
  explicit ScratchShape(const VoteBatch& w) {
    constexpr int kCtasOfSm = 2;
    run = w.of_groups() ? w.rule.unit_tokens : 1;
    blocks = (w.candidate_stride + kBlockRows - 1) / kBlockRows + 1;  // the first may begin inside
    const int rows = w.kv_heads() * w.batch;
    // CTAs of less than 512 candidates do not pay.
    splits = SplitsOfWave(kCtasOfSm, rows, (blocks + kWarps - 1) / kWarps);
    const int64_t cells = int64_t{w.batch} * blocks * w.query_heads;
    heads_at = cells * (kBlockRows / run) * static_cast<int64_t>(sizeof(__half));
    block_max_at =
        heads_at + int64_t{w.batch} * splits * w.query_heads * static_cast<int64_t>(sizeof(float2));
    bytes = block_max_at + cells * static_cast<int64_t>(sizeof(float));
  }
  int run = 1, blocks = 0, splits = 0;
  int64_t heads_at = 0, block_max_at = 0, bytes = 0;
};

Scratch ScratchOf(const VoteBatch& w) {
  const ScratchShape shape(w);
  auto* at = static_cast<std::byte*>(w.scratch);
  Scratch s;
  s.blocks = shape.blocks;
  s.splits = shape.splits;
  s.run = shape.run;
  s.stays = shape.heads_at <= kStaysBytes;
  s.weights = reinterpret_cast<__half*>(at);
  s.heads = reinterpret_cast<float2*>(at + shape.heads_at);
  s.block_max = reinterpret_cast<float*>(at + shape.block_max_at);
  return s;
}

template <typename T, int kDim, bool kDeviation>
int LaunchWeights(const VoteBatch& w, const Scratch& scratch, Stream stream) {
  constexpr int kBytes = sizeof(Shared<kDim>);
  if (const int error = AllowShared(WeightKernel<T, kDim, kDeviation>, kBytes); error != 0)
    return error;
  const dim3 runs(scratch.splits, w.rows.kv_heads, w.batch);
  return LaunchDependent(WeightKernel<T, kDim, kDeviation>, runs, kWarps * 32, kBytes, stream, w,
                         scratch);
}

template <typename Row, bool kRuns = false>
int LaunchSums(const VoteBatch& w, const Scratch& scratch, Stream stream) {
  const int lists = w.output_rows * w.batch;
  const int blocks = kSumWarps * 32 * scratch.run / kTileRows;  // that a CTA takes at once
  const dim3 sums(SplitsOfWave(kSumCtasOfSm, lists, (scratch.blocks + blocks - 1) / blocks),
                  w.output_rows, w.batch);
  const int heads = w.query_heads / w.output_rows;
  return LaunchDependent(VoteKernel<Row, kRuns>, sums, kSumWarps * 32, heads * sizeof(float2),
                         stream, w, scratch);
}

bool IsValid(const VoteBatch& w) {
  const int run = w.of_groups() ? w.rule.unit_tokens : 1;
  return w.fields >= 1 && w.fields <= 2 && (!w.deviation || w.fields == 2) &&
         (run == 1 || run == 4 || run == 8 || run == 16) && w.candidate_stride % run == 0 &&
         w.kv_heads() >= 1 && w.query_heads % w.kv_heads() == 0 &&
         w.query_heads <= 8 * w.kv_heads() &&
         (w.output_rows == 1 || w.output_rows == w.kv_heads()) && w.scratch != nullptr &&
         (w.reuse.caches == nullptr ||
          (w.rule.unit_tokens == 1 && w.tokens == w.reuse.voting && !w.of_groups()));
}

}  // namespace

int64_t VoteScratchBytes(const VoteBatch& w) { return ScratchShape(w).bytes; }

int VoteCuda(const VoteBatch& w, Stream stream) {
  if (w.batch == 0 || w.candidate_stride == 0) return cudaSuccess;
  if (!IsValid(w)) return cudaErrorInvalidValue;
  const Scratch scratch = ScratchOf(w);
  if (w.of_groups()) {
    const int error = LaunchBitsWeights(w, scratch, stream);
    if (error != 0) return error;
    return scratch.run > 1 ? LaunchSums<RowOfFour, true>(w, scratch, stream)
                           : LaunchSums<RowOfFour>(w, scratch, stream);
  }
  const int error = ForRows(w.rows.dtype, w.rows.head_dim, [&]<typename T, int kDim>() {
    return w.deviation ? LaunchWeights<T, kDim, true>(w, scratch, stream)
                       : LaunchWeights<T, kDim, false>(w, scratch, stream);
  });
  return error != 0 ? error : LaunchSums<RowOfTiles>(w, scratch, stream);
}

}  // namespace kvstrata::cuda
