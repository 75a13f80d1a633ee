#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/ops/score_bits/bits_tile.cuh"
#include "kernels/ops/score_bits/score_bits_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileTokens = 32;

// This lane's channels of its column's query, divided by a power of two that leaves none above 1.
template <int kDim, int kBits>
struct LaneQueryPairs {
  LanePairs<kDim, kBits> pairs;
  float unit;  // that power
};

__device__ void LoadFour(const void* q, DType dtype, int64_t at, float* out) {
  if (dtype == DType::kF32) {
    const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(q) + at);
    out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
    return;
  }
  const uint2 four = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(q) + at);
  const uint32_t pairs[2] = {four.x, four.y};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const auto bits = static_cast<uint16_t>(pairs[e / 2] >> (16 * (e % 2)));
    out[e] = dtype == DType::kF16 ? FloatOf(__ushort_as_half(bits))
                                  : FloatOf(__ushort_as_bfloat16(bits));
  }
}

// Column g: query g of the group; in groups up to 4, column 4 + g what fp16 leaves of query g.
template <int kDim, int kBits>
__device__ LaneQueryPairs<kDim, kBits> LoadQuery(const ScoreBitsBatch& w, int64_t first_element,
                                                 int group) {
  using Shape = BitsShape<kDim, kBits>;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int query = group > 4 ? g : g % 4;
  const bool low = group <= 4 && g >= 4;
  float x[Shape::kRuns][Shape::kLaneChannels] = {};
  float largest = 0;
#pragma unroll
  for (int m = 0; m < Shape::kRuns; ++m) {
    const int64_t at =
        first_element + int64_t{query} * kDim + m * Shape::kRunChannels + Shape::kLaneChannels * t;
#pragma unroll
    for (int i = 0; i < Shape::kLaneChannels; i += 4) {
      if (query < group) LoadFour(w.q, w.q_dtype, at + i, &x[m][i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(x[m][i + e]));
    }
  }
  for (int step = 1; step < 4; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  }
  LaneQueryPairs<kDim, kBits> out;
  // 2^e, at least `largest`; a query of less than 2^-100 counts as one of that size.
  const int exponent = largest > 0x1p-100f ? ilogbf(largest) + 1 : -100;
  out.unit = ldexpf(1.0f, exponent);
  const float inverse = ldexpf(1.0f, -exponent);
#pragma unroll
  for (int m = 0; m < Shape::kRuns; ++m) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneChannels; i += 2) {
      const float a = x[m][i] * inverse, b = x[m][i + 1] * inverse;
      const __half2 high = __floats2half2_rn(a, b);
      const __half2 rest = __floats2half2_rn(a - __low2float(high), b - __high2float(high));
      out.pairs.at[m][i / 4][i / 2 % 2] = low ? rest : high;
    }
  }
  return out;
}

// The query with a group's scales: its products with the minima less 2^bits times its sum with the
// steps (c of two rows that are alike), and in `folded` the query times the steps.
template <int kDim, int kBits>
__device__ void Fold(const char* group, const GroupOffsets& f, const LanePairs<kDim, kBits>& query,
                     LanePairs<kDim, kBits>& folded, float (&base)[4]) {
  using Shape = BitsShape<kDim, kBits>;
  const int t = threadIdx.x % 4;
  LanePairs<kDim, kBits> minima, ones;
  minima.Load(group, t);
  folded.Load(group + f.step, t);
#pragma unroll
  for (int m = 0; m < Shape::kRuns; ++m) {
#pragma unroll
    for (int u = 0; u < Shape::kWords; ++u) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        folded.at[m][u][i] = __hmul2(folded.at[m][u][i], query.at[m][u][i]);
        ones.at[m][u][i] = __float2half2_rn(1.0f);
      }
    }
  }
  float sums[4] = {};
  AddEveryRow(sums, ones, folded);
  for (float& x : base) x = 0;
  AddEveryRow(base, minima, query);
#pragma unroll
  for (int i = 0; i < 4; ++i) base[i] -= static_cast<float>(1 << kBits) * sums[i];
}

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
  const auto query = LoadQuery<kDim, kBits>(w, first_row * kDim, group);
  float factor[2];
  for (int i = 0; i < 2; ++i) {  // of columns 2t and 2t + 1, from a lane of those columns
    factor[i] = w.scale * __shfl_sync(~0u, query.unit, 4 * (2 * (lane % 4) + i));
  }
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
    float base[4];
    Fold(at, f, query.pairs, folded, base);
    for (int token = 0; token < f.tokens; token += kTileTokens) {
      const BitsTile<kDim, kBits> tile = next;
      if (token + kTileTokens < f.tokens) next.Load(at, f, token + kTileTokens, lane);
      float c[2][4] = {{base[0], base[1], base[2], base[3]}, {base[0], base[1], base[2], base[3]}};
      tile.Multiply(folded, c);
      Write(w, c, factor, first_row, group, g * f.tokens + token, units, end);
    }
  }
}

template <int kDim, int kBits>
int Launch(const ScoreBitsBatch& w, Stream stream) {
  constexpr int kCtas = 660;  // five on each of 132 SMs
  const int rows = w.groups.kv_heads * w.batch;
  const int groups = w.candidate_stride / w.groups.format.tokens + 2;
  const int splits =
      std::max(1, std::min((kCtas + rows - 1) / rows, (groups + kWarps - 1) / kWarps));
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
