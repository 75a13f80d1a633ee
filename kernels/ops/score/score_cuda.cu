#include <algorithm>
#include <cmath>

#include "kernels/cuda/row_scores.cuh"
#include "kernels/ops/score/score_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kTileRows = 16;  // units a warp scores at a time

// The largest of a row's scores over the group, in all four lanes of the row.
__device__ float GroupMax(const float (&scores)[2], int first_query, int group) {
  float best = -INFINITY;
  for (int i = 0; i < 2; ++i) {
    if (first_query + i < group) best = fmaxf(best, scores[i]);
  }
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  return fmaxf(best, __shfl_xor_sync(~0u, best, 2));
}

// Grid (splits, kv_heads, batch); warps take tiles of units in turn.
template <typename T, int kDim>
__global__ __launch_bounds__(kWarps * 32) void ScoreKernel(ScoreBatch w) {
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

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint64_t* pages = w.rows.pages + int64_t{sequence} * w.rows.page_stride;
  const int64_t head_offset = w.rows.offset + head * w.rows.head_stride + 16 * t;
  float* out = w.scores + (int64_t{sequence} * w.rows.kv_heads + head) * w.unit_stride;
  const int step = static_cast<int>(gridDim.x) * kWarps * kTileRows;
  // Tiles begin at multiples of 16 units, where a run of rows in a block begins too.
  int tile = units.first / kTileRows * kTileRows;
  tile += (static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / 32) * kTileRows;
  for (; tile < units.last; tile += step) {
    const int near = min(max(tile + g, units.first), units.last - 1);
    const int far = min(max(tile + g + 8, units.first), units.last - 1);
    const LaneScores scores = ScoreRows<T>(queries, w.fields, w.field_stride, wide,
                                           RowAddress(w.rows, pages, head_offset, near),
                                           RowAddress(w.rows, pages, head_offset, far));
    const float best_g = GroupMax(scores.row_g, LaneQuery(lane, wide), group);
    const float best_g8 = GroupMax(scores.row_g8, LaneQuery(lane, wide), group);
    if (t == 0 && near == tile + g) out[near - units.first] = best_g;
    if (t == 1 && far == tile + g + 8) out[far - units.first] = best_g8;
  }
}

template <typename T, int kDim>
int Launch(const ScoreBatch& w, Stream stream) {
  // About two waves of CTAs over the GPU: enough loads in flight, little left over at the end.
  constexpr int kCtas = 1056;
  const int tiles = (w.unit_stride + kTileRows) / kTileRows + 1;
  const int wanted = (kCtas + w.rows.kv_heads * w.batch - 1) / (w.rows.kv_heads * w.batch);
  const int splits = std::max(1, std::min(wanted, (tiles + kWarps - 1) / kWarps));
  ScoreKernel<T, kDim><<<dim3(splits, w.rows.kv_heads, w.batch), kWarps * 32, 0,
                         static_cast<cudaStream_t>(stream)>>>(w);
  return cudaGetLastError();
}

template <typename T>
int LaunchDim(const ScoreBatch& w, Stream stream) {
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

}  // namespace

int ScoreCuda(const ScoreBatch& w, Stream stream) {
  if (w.batch == 0 || w.unit_stride == 0) return cudaSuccess;
  if (w.fields < 1 || w.fields > 2 || w.rows.kv_heads < 1 || w.query_heads % w.rows.kv_heads != 0 ||
      w.query_heads > 8 * w.rows.kv_heads) {
    return cudaErrorInvalidValue;
  }
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
