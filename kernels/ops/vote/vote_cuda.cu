#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/cuda/row_scores.cuh"
#include "kernels/ops/vote/vote_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kTileRows = 16;
constexpr int kTiles = 4;                       // of a block
constexpr int kBlockRows = kTileRows * kTiles;  // candidates that share a maximum
constexpr int kWarps = 8;                       // of a CTA of the first kernel
constexpr int kSumBlocks = 16;                  // blocks that a CTA of the second kernel sums
constexpr int kHeadTile = 32;                   // heads whose weights it holds at a time
constexpr float kWeightScale = 32768.0f;        // exp() of a block's maximum as fp16
constexpr float kLog2E = 1.4426950408889634f;

// 2^x in one instruction; 2^-inf = 0.
__device__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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
  __half* weights = nullptr;   // [batch][blocks][query_heads][16 rows][4 tiles]
  float* block_max = nullptr;  // [batch][blocks][query_heads], of scores times log2(e)
  float2* heads = nullptr;     // [batch][splits][query_heads], maximum and sum

  __device__ __half* WeightsOf(int64_t sequence, int block, int query_heads, int head) const {
    return weights + ((sequence * blocks + block) * query_heads + head) * kBlockRows;
  }
};

// What a lane holds of a block: its two queries, in 4 tiles, of one row (groups up to 4) or two.
struct BlockScores {
  float x[kTiles][2][2];  // [tile][row g, row g + 8][query]
};

template <typename T, int kDim>
__device__ BlockScores ScoreBlock(const VoteBatch& w, const QueryFragments<kDim>& queries,
                                  bool wide, const uint64_t* pages, int64_t head_offset,
                                  Candidates units, int begin, float scale) {
  const int lane = threadIdx.x % 32, g = lane / 4;
  BlockScores out;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int near = begin + tile * kTileRows + g, far = near + 8;
    const auto clamped = [&](int row) { return min(max(row, units.first), units.last - 1); };
    const LaneScores s = ScoreRows<T>(queries, w.fields, w.field_stride, wide,
                                      RowAddress(w.rows, pages, head_offset, clamped(near)),
                                      RowAddress(w.rows, pages, head_offset, clamped(far)));
    const bool near_counts = near == clamped(near), far_counts = far == clamped(far);
    // In groups up to 4, lanes t and t + 2 hold the same scores: one takes row g, one row g + 8.
    const bool take_far = !wide && (lane & 2) != 0;
    for (int i = 0; i < 2; ++i) {
      const float x = take_far ? s.row_g8[i] : s.row_g[i];
      out.x[tile][0][i] = (take_far ? far_counts : near_counts) ? x * scale : -INFINITY;
      out.x[tile][1][i] = far_counts && wide ? s.row_g8[i] * scale : -INFINITY;
    }
  }
  return out;
}

// Over the lanes that hold the block's other rows of the same queries.
template <typename Combine>
__device__ float AcrossRows(float x, bool wide, Combine combine) {
  if (!wide) x = combine(x, __shfl_xor_sync(~0u, x, 2));
  for (int step = 4; step < 32; step *= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  return x;
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

// The CTA's maximum and sum of each head from its warps', in order of the warps.
__device__ void KeepTotals(const VoteBatch& w, const Scratch& scratch, const Softmax (&totals)[2],
                           bool wide, int sequence, int first_head, int group) {
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

// Grid (splits, kv_heads, batch). A CTA takes a run of blocks, its warps by turns.
template <typename T, int kDim>
__global__ __launch_bounds__(kWarps * 32, 2) void WeightKernel(VoteBatch w, Scratch scratch) {
  __shared__ QueryFragments<kDim> queries;
  const int head = blockIdx.y, sequence = blockIdx.z;
  const int group = w.query_heads / w.rows.kv_heads;
  const bool wide = group > 4;
  const Candidates units = CandidatesOf(w.rule, w.tokens[sequence]);
  // Before the test, so that queries and `tokens` arrive together.
  LoadQueries<T>(&queries, w.q, w.q_dtype,
                 (int64_t{sequence} * w.query_heads + head * group) * kDim, group, w.fields);
  if (units.full) return;
  __syncthreads();

  const int first_block = units.first / kBlockRows;
  const int count = (units.last + kBlockRows - 1) / kBlockRows - first_block;
  const int each = (count + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int begin = static_cast<int>(blockIdx.x) * each, end = min(begin + each, count);
  const uint64_t* pages = w.rows.pages + int64_t{sequence} * w.rows.page_stride;
  const int64_t head_offset = w.rows.offset + head * w.rows.head_stride + 16 * (threadIdx.x % 4);
  Softmax totals[2];
  for (int slot = begin + static_cast<int>(threadIdx.x) / 32; slot < end; slot += kWarps) {
    const BlockScores s = ScoreBlock<T>(w, queries, wide, pages, head_offset, units,
                                        (first_block + slot) * kBlockRows, w.scale * kLog2E);
    KeepBlock(w, scratch, s, wide, sequence, slot, head * group, group, totals);
  }
  KeepTotals(w, scratch, totals, wide, sequence, head * group, group);
}

// Maximum and 1 / sum of a head over all splits: by a warp, in a fixed order.
__device__ float2 HeadTotal(const Scratch& scratch, int64_t sequence, int query_heads, int head) {
  Softmax all;
  for (int split = threadIdx.x % 32; split < scratch.splits; split += 32) {
    const float2 part = scratch.heads[(sequence * scratch.splits + split) * query_heads + head];
    all.Add(part.x, part.y);
  }
  for (int step = 16; step > 0; step /= 2) {
    const float max = __shfl_down_sync(~0u, all.max, step);
    const float sum = __shfl_down_sync(~0u, all.sum, step);
    all.Add(max, sum);
  }
  const float max = __shfl_sync(~0u, all.max, 0), sum = __shfl_sync(~0u, all.sum, 0);
  return {max, sum == 0 ? 0.0f : 1.0f / (sum * kWeightScale)};
}

// Grid (candidates / 1024, output_rows, batch), 256 threads: thread i sums row i % 16 of the four
// tiles of block i / 16, over the heads in order.
__global__ __launch_bounds__(kSumBlocks * 16) void VoteKernel(VoteBatch w, Scratch scratch) {
  __shared__ float head_weight[kSumBlocks][kHeadTile];
  const Candidates units = CandidatesOf(w.rule, w.tokens[blockIdx.z]);
  const int first_block = units.first / kBlockRows;
  const int count = (units.last + kBlockRows - 1) / kBlockRows - first_block;
  const int slots = static_cast<int>(blockIdx.x) * kSumBlocks;
  if (units.full || slots >= count) return;
  const int64_t sequence = blockIdx.z;
  const int heads = w.query_heads / w.output_rows, first_head = heads * blockIdx.y;
  const int slot = slots + threadIdx.x / 16, row = threadIdx.x % 16;
  float votes[kTiles] = {};
  for (int tile = 0; tile < heads; tile += kHeadTile) {
    const int tile_heads = min(kHeadTile, heads - tile);
    __syncthreads();
    for (int h = threadIdx.x / 32; h < tile_heads; h += kSumBlocks / 2) {
      const int head = first_head + tile + h, lane = threadIdx.x % 32;
      const float2 total = HeadTotal(scratch, sequence, w.query_heads, head);
      if (lane >= kSumBlocks || slots + lane >= count) continue;
      const float max =
          scratch.block_max[(sequence * scratch.blocks + slots + lane) * w.query_heads + head];
      head_weight[lane][h] = Exp2(max - Softmax::Shift(total.x)) * total.y;
    }
    __syncthreads();
    if (slot >= count) continue;
    const auto* weights = reinterpret_cast<const uint2*>(
                              scratch.WeightsOf(sequence, slot, w.query_heads, first_head + tile)) +
                          row;
#pragma unroll 8
    for (int h = 0; h < tile_heads; ++h) {
      const uint2 bits = weights[h * kTileRows];
      const float2 low = __half22float2(reinterpret_cast<const __half2&>(bits.x));
      const float2 high = __half22float2(reinterpret_cast<const __half2&>(bits.y));
      const float weight = head_weight[threadIdx.x / 16][h];
      votes[0] += weight * low.x;
      votes[1] += weight * low.y;
      votes[2] += weight * high.x;
      votes[3] += weight * high.y;
    }
  }
  if (slot >= count) return;
  float* out = w.votes + (sequence * w.output_rows + blockIdx.y) * w.candidate_stride;
  for (int tile = 0; tile < kTiles; ++tile) {
    const int unit = (first_block + slot) * kBlockRows + tile * kTileRows + row;
    if (unit >= units.first && unit < units.last) out[unit - units.first] = votes[tile];
  }
}

// Bytes of a call's scratch, and where its parts begin. REQUIRES: a valid shape.
struct ScratchShape {
  explicit ScratchShape(const VoteBatch& w) {
    // One wave of two CTAs on each of 132 SMs; runs of less than 512 candidates do not pay.
    constexpr int kCtas = 264;
    blocks = (w.candidate_stride + kBlockRows - 1) / kBlockRows + 1;  // the first may begin inside
    const int rows = w.rows.kv_heads * w.batch;
    splits = std::max(1, std::min((kCtas + rows / 2) / rows, (blocks + kWarps - 1) / kWarps));
    const int64_t cells = int64_t{w.batch} * blocks * w.query_heads;
    heads_at = cells * kBlockRows * static_cast<int64_t>(sizeof(__half));
    block_max_at =
        heads_at + int64_t{w.batch} * splits * w.query_heads * static_cast<int64_t>(sizeof(float2));
    bytes = block_max_at + cells * static_cast<int64_t>(sizeof(float));
  }
  int blocks = 0, splits = 0;
  int64_t heads_at = 0, block_max_at = 0, bytes = 0;
};

Scratch ScratchOf(const VoteBatch& w) {
  const ScratchShape shape(w);
  auto* at = static_cast<std::byte*>(w.scratch);
  Scratch s;
  s.blocks = shape.blocks;
  s.splits = shape.splits;
  s.weights = reinterpret_cast<__half*>(at);
  s.heads = reinterpret_cast<float2*>(at + shape.heads_at);
  s.block_max = reinterpret_cast<float*>(at + shape.block_max_at);
  return s;
}

template <typename T, int kDim>
int Launch(const VoteBatch& w, Stream stream) {
  const Scratch scratch = ScratchOf(w);
  const auto on = static_cast<cudaStream_t>(stream);
  WeightKernel<T, kDim>
      <<<dim3(scratch.splits, w.rows.kv_heads, w.batch), kWarps * 32, 0, on>>>(w, scratch);
  if (const int error = cudaGetLastError(); error != cudaSuccess) return error;
  VoteKernel<<<dim3((scratch.blocks + kSumBlocks - 1) / kSumBlocks, w.output_rows, w.batch),
               kSumBlocks * 16, 0, on>>>(w, scratch);
  return cudaGetLastError();
}

template <typename T>
int LaunchDim(const VoteBatch& w, Stream stream) {
  switch (w.rows.head_dim) {
    case 64:
      return Launch<T, 64>(w, stream);
    case 128:
      return Launch<T, 128>(w, stream);
    case 256:
      return Launch<T, 256>(w, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

bool IsValid(const VoteBatch& w) {
  return w.fields >= 1 && w.fields <= 2 && w.rows.kv_heads >= 1 &&
         w.query_heads % w.rows.kv_heads == 0 && w.query_heads <= 8 * w.rows.kv_heads &&
         (w.output_rows == 1 || w.output_rows == w.rows.kv_heads) && w.scratch != nullptr;
}

}  // namespace

int64_t VoteScratchBytes(const VoteBatch& w) { return ScratchShape(w).bytes; }

int VoteCuda(const VoteBatch& w, Stream stream) {
  if (w.batch == 0 || w.candidate_stride == 0) return cudaSuccess;
  if (!IsValid(w)) return cudaErrorInvalidValue;
  switch (w.rows.dtype) {
    case DType::kBF16:
      return LaunchDim<__nv_bfloat16>(w, stream);
    case DType::kF16:
      return LaunchDim<__half>(w, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace kvstrata::cuda
