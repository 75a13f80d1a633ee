// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/always/always_cuda.h"
#include "kernels/ops/quantise_keys/noise_groups.h"
#include "kernels/ops/vote/vote_weights.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kAlwaysWarps = 32;  // warps of a CTA
constexpr int kGroupMost = 8;     // queries of a KV head

__device__ float WarpSum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// What the warps of a CTA found of each query.
struct Found {
  float2 rows[kAlwaysWarps][kGroupMost];  // maximum and sum
  float noise[kAlwaysWarps][kGroupMost];  // sum over groups of the squares
};

// One KV head of one sequence, by a CTA. A lane has the channels lane + 32 i.
template <typename T, int kDim>
class AlwaysHead {
 public:
  static constexpr int kOfLane = kDim / 32;

  __device__ AlwaysHead(const AlwaysBatch& w, const GroupOffsets& f, int sequence, int head,
                        const float* q, int group)
      : w_(w), f_(f), sequence_(sequence), head_(head), q_(q), group_(group) {}

  // Over the tokens [0, first) and [last, tokens), those of a warp in turn.
  __device__ void AddRows(Candidates units, int32_t tokens, Softmax (&totals)[kGroupMost]) const {
    const int32_t count = units.first + (tokens - units.last);
    for (int32_t i = warp(); i < count; i += kAlwaysWarps) {
      const int32_t t = i < units.first ? i : units.last + (i - units.first);
      float x[kOfLane];
      LoadRow(t, x);
#pragma unroll
      for (int query = 0; query < kGroupMost; ++query) {
        if (query >= group_) break;
        float sum = 0;
        for (int c = 0; c < kOfLane; ++c) sum += x[c] * Query(query, c);
        totals[query].Add(w_.scale * kLog2E * WarpSum(sum), 1.0f);
      }
    }
  }

  // The squares of the steps of the groups that stand for all, those of a warp in turn.
  __device__ void AddSteps(int32_t groups, float (&squares)[kOfLane]) const {
#pragma unroll 4
    for (int32_t g = FirstOfNoise(groups) + warp() * kNoiseEvery; g < groups;
         g += kAlwaysWarps * kNoiseEvery) {
      const __half* const steps = StepsOf(g);
      for (int c = 0; c < kOfLane; ++c) {
        const float step = __half2float(steps[lane() + 32 * c]);
        squares[c] += step * step;
      }
    }
  }

  __device__ float Query(int query, int c) const { return q_[query * kDim + lane() + 32 * c]; }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ void LoadRow(int32_t t, float (&x)[kOfLane]) const {
    const DeviceRows& k = w_.keys;
    const uint64_t page = k.pages[int64_t{sequence_} * k.page_stride + t / k.page_rows];
    const auto* row = reinterpret_cast<const T*>(page + k.offset + head_ * k.head_stride +
                                                 t % k.page_rows * k.row_stride);
    for (int c = 0; c < kOfLane; ++c) x[c] = FloatOf(row[lane() + 32 * c]);
  }

  __device__ const __half* StepsOf(int32_t g) const {
    const DeviceGroups& groups = w_.groups;
    const uint64_t block =
        groups.blocks[int64_t{sequence_} * groups.block_stride + g / groups.block_groups];
    return reinterpret_cast<const __half*>(block + groups.offset + head_ * groups.head_stride +
                                           int64_t{g % groups.block_groups} * f_.bytes + f_.step);
  }

  const AlwaysBatch& w_;
  const GroupOffsets& f_;
  const int sequence_, head_;
  const float* const q_;  // [group][kDim], in shared memory
  const int group_;
};

template <int kDim>
__device__ void LoadQueries(const AlwaysBatch& w, int64_t first, int count, float* out) {
  for (int i = threadIdx.x; i < count * kDim; i += kAlwaysWarps * 32) {
    const int64_t at = first * kDim + i;
    out[i] = w.q_dtype == DType::kBF16  ? FloatOf(static_cast<const __nv_bfloat16*>(w.q)[at])
             : w.q_dtype == DType::kF16 ? FloatOf(static_cast<const __half*>(w.q)[at])
                                        : static_cast<const float*>(w.q)[at];
  }
}

// A thread a query: all warps' parts, in order.
__device__ void WriteQuery(const AlwaysBatch& w, const Found& found, int query, int32_t sampled,
                           float* out) {
  Softmax all;
  float squares = 0;
  for (int warp = 0; warp < kAlwaysWarps; ++warp) {
    all.Add(found.rows[warp][query].x, found.rows[warp][query].y);
    squares += found.noise[warp][query];
  }
  const float noise =
      sampled == 0 ? 0.0f : w.scale * w.scale * squares / (12.0f * static_cast<float>(sampled));
  out[0] = all.max;
  out[1] = all.sum;
  out[2] = Exp2(-0.5f * kLog2E * noise);
}

// Grid (kv_heads, batch).
template <typename T, int kDim>
__global__ __launch_bounds__(kAlwaysWarps *
                             32) void AlwaysKernel(const __grid_constant__ AlwaysBatch w,
                                                   const __grid_constant__ GroupOffsets f) {
  __shared__ float q[kGroupMost * kDim];
  __shared__ Found found;
  const int head = blockIdx.x, sequence = blockIdx.y, group = w.query_heads / w.keys.kv_heads;
  WaitForPrevious();
  LetNextStart();
  const int32_t tokens = w.tokens[sequence];
  const Candidates units = CandidateTokensOf(w.rule, tokens);
  if (units.full) return;
  const int64_t first = int64_t{sequence} * w.query_heads + head * group;
  LoadQueries<kDim>(w, first, group, q);
  __syncthreads();

  const AlwaysHead<T, kDim> own(w, f, sequence, head, q, group);
  const int32_t groups = (tokens - 1) / f.tokens;
  Softmax totals[kGroupMost];
  float squares[kDim / 32] = {};
  own.AddRows(units, tokens, totals);
  if (groups > 0) own.AddSteps(groups, squares);
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int query = 0; query < kGroupMost; ++query) {
    if (query >= group) break;
    float sum = 0;
    for (int c = 0; c < kDim / 32; ++c)
      sum += own.Query(query, c) * own.Query(query, c) * squares[c];
    found.noise[warp][query] = WarpSum(sum);
    found.rows[warp][query] = {totals[query].max, totals[query].sum};
  }
  __syncthreads();
  const int query = threadIdx.x;
  if (query >= group) return;
  const int32_t sampled = groups == 0 ? 0 : (groups - 1 - FirstOfNoise(groups)) / kNoiseEvery + 1;
  WriteQuery(w, found, query, sampled, w.always + (first + query) * kAlwaysFloats);
}

}  // namespace

int AlwaysCuda(const AlwaysBatch& w, Stream stream) {
  if (w.batch == 0) return cudaSuccess;
  const int heads = w.keys.kv_heads;
  if (heads < 1 || w.query_heads % heads != 0 || w.query_heads / heads > kGroupMost ||
      w.groups.kv_heads != heads || w.groups.format.dim != w.keys.head_dim ||
      !w.groups.format.IsValid()) {
    return cudaErrorInvalidValue;
  }
  return ForRows(w.keys.dtype, w.keys.head_dim, [&]<typename T, int kDim>() {
    return LaunchDependent(AlwaysKernel<T, kDim>, dim3(heads, w.batch), kAlwaysWarps * 32, 0,
                           stream, w, GroupOffsets::Of(w.groups.format));
  });
}

}  // namespace kvstrata::cuda
