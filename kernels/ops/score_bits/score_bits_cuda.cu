// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/score_bits/bits_query.cuh"
#include "kernels/ops/score_bits/score_bits_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileTokens = 32;

// What a lane writes: of its two columns, all four tokens (groups above 4), or two of them.
__device__ void Write(const ScoreBitsBatch& w, const float (&c)[2][4], const float (&factor)[2],
                      int64_t first_row, int group, int token, Candidates units, int end) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const bool wide = group > 4;
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    const int query = 2 * (wide ? t : t % 2) + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // tokens
      float x = c[i / 2][2 * (i % 2) + column];
      if (!wide) x += __shfl_xor_sync(~0u, x, 2);
      const int at = token + lane / 4 * 4 + i;
      const bool mine = wide || (i / 2 == t / 2);
      if (!mine || query >= group || at < units.first || at >= end) continue;
      w.logits[(first_row + query) * w.candidate_stride + (at - units.first)] = x * factor[column];
    }
  }
}

// Grid (splits, kv_heads, batch); warps take groups in turn.
template <int kDim, int kBits>
__global__ __launch_bounds__(kThreads) void ScoreBitsKernel(
    const __grid_constant__ ScoreBitsBatch w, const GroupOffsets f) {
  const int head = blockIdx.y, sequence = blockIdx.z, lane = threadIdx.x % 32;
  const int group = w.query_heads / w.groups.kv_heads;
  LetNextStart();
  WaitForPrevious();
  const int32_t tokens = w.tokens[sequence];
  const Candidates units = CandidatesOf(w.rule, tokens);
  if (units.full) return;
  const int end = min(units.last, (tokens - 1) / f.tokens * f.tokens);
  const int64_t first_row = int64_t{sequence} * w.query_heads + head * group;
  const auto query = LaneQueryPairs<kDim, kBits>::Load(w.q, w.q_dtype, first_row * kDim, group);
  float factor[2];
  query.Factors(w.scale, factor);
  const int step = static_cast<int>(gridDim.x) * kWarps;
  const int begin = units.first / f.tokens + blockIdx.x * kWarps + threadIdx.x / 32;
  for (int g = begin; g * f.tokens < end; g += step) {
    const uint64_t block =
        w.groups.blocks[int64_t{sequence} * w.groups.block_stride + g / w.groups.block_groups];
    const char* at = reinterpret_cast<const char*>(block) + w.groups.offset +
                     head * w.groups.head_stride + g % w.groups.block_groups * f.bytes;
    BitsTile<kDim, kBits> next;
    next.Load(at, f, 0, lane);
    LanePairs<kDim, kBits> folded;
    float base[2];
    Fold(at, f, query, group, folded, base);
    for (int token = 0; token < f.tokens; token += kTileTokens) {
      const BitsTile<kDim, kBits> tile = next;
      if (token + kTileTokens < f.tokens) next.Load(at, f, token + kTileTokens, lane);
      float c[2][4] = {{base[0], base[1], base[0], base[1]}, {base[0], base[1], base[0], base[1]}};
      tile.Multiply(folded, c);
      Write(w, c, factor, first_row, group, g * f.tokens + token, units, end);
    }
  }
}

template <int kDim, int kBits>
int Launch(const ScoreBitsBatch& w, Stream stream) {
  constexpr int kCtasOfSm = 5;
  const int rows = w.groups.kv_heads * w.batch;
  const int groups = w.candidate_stride / w.groups.format.tokens + 2;
  const int splits = SplitsOfWave(kCtasOfSm, rows, (groups + kWarps - 1) / kWarps);
  return LaunchDependent(ScoreBitsKernel<kDim, kBits>, dim3(splits, w.groups.kv_heads, w.batch),
                         kThreads, 0, stream, w, GroupOffsets::Of(w.groups.format));
}

template <int kDim>
int LaunchBits(const ScoreBitsBatch& w, Stream stream) {
  switch (w.groups.format.bits) {
    case 2:
      return Launch<kDim, 2>(w, stream);
    case 3:
      return Launch<kDim, 3>(w, stream);
    default:
      return Launch<kDim, 4>(w, stream);
  }
}

}  // namespace

int ScoreBitsCuda(const ScoreBitsBatch& w, Stream stream) {
  if (w.batch == 0 || w.candidate_stride == 0) return cudaSuccess;
  const QuantisedGroup& f = w.groups.format;
  if (!f.IsValid() || f.tokens % kTileTokens != 0 || w.groups.kv_heads < 1 ||
      w.query_heads % w.groups.kv_heads != 0 || w.query_heads > 8 * w.groups.kv_heads ||
      w.rule.unit_tokens != 1) {
    return cudaErrorInvalidValue;
  }
  switch (f.dim) {
    case 64:
      return LaunchBits<64>(w, stream);
    case 128:
      return LaunchBits<128>(w, stream);
    default:
      return LaunchBits<256>(w, stream);
  }
}

}  // namespace kvstrata::cuda
