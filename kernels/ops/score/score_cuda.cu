// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/row_scores.cuh"
#include "kernels/ops/score/score_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kTileRows = 16;  // units a warp scores at a time

template <int kDim>
struct Shared {
  QueryFragments<kDim> queries;
  RowRing<kDim> rings[kWarps];
};

// Grid (splits, kv_heads, batch); warps take tiles of units in turn.
template <typename T, int kDim, bool kDeviation>
__global__ __launch_bounds__(kWarps * 32, 4) void ScoreKernel(ScoreBatch w) {
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<Shared<kDim>*>(dynamic);
  const int head = blockIdx.y, sequence = blockIdx.z;
  const int group = w.query_heads / w.rows.kv_heads;
  const bool wide = group > 4;
  LetNextStart();
  if (!w.ahead) WaitForPrevious();
  const Candidates units = CandidatesOf(w.rule, w.tokens[sequence]);
  if (units.full) {
    if (w.ahead) WaitForPrevious();  // whoever waits for this kernel waits for those before, too
    return;
  }

  // Tiles begin at multiples of 16 units, where a run of rows in a block begins too.
  const int step = static_cast<int>(gridDim.x) * kWarps * kTileRows;
  const int warp = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int begin = units.first / kTileRows * kTileRows + warp * kTileRows;
  const int tiles = max(0, (units.last - begin + step - 1) / step);
  const auto row_of = [=](int tile) { return begin + tile * step; };
  TileScorer<T, kDim, kDeviation, decltype(row_of)> scorer(
      w.rows, w.fields, w.field_stride, sequence, head, units.first, units.last, tiles, row_of,
      shared.queries, wide, &shared.rings[threadIdx.x / 32]);
  if (w.ahead) WaitForPrevious();
  LoadQueries<T, kDeviation>(&shared.queries, w.q, w.q_dtype,
                             w.QueriesAt(sequence) + head * group * kDim, group, w.fields);
  __syncthreads();

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* out = w.scores + (int64_t{sequence} * w.rows.kv_heads + head) * w.unit_stride;
  for (int tile = 0; tile < tiles; ++tile) {
    const LaneScores scores = scorer.Next();
    const float best_g = GroupMax(scores.row_g, LaneQuery(lane, wide), group);
    const float best_g8 = GroupMax(scores.row_g8, LaneQuery(lane, wide), group);
    const int unit = row_of(tile) + g + 8 * t;  // by lanes t = 0 and 1
    if (t < 2 && unit >= units.first && unit < units.last) {
      out[unit - units.first] = t == 0 ? best_g : best_g8;
    }
  }
}

template <typename T, int kDim, bool kDeviation>
int Launch(const ScoreBatch& w, Stream stream) {
  constexpr int kCtasOfSm = 4;
  constexpr int kBytes = sizeof(Shared<kDim>);
  if (const int error = AllowShared(ScoreKernel<T, kDim, kDeviation>, kBytes); error != 0)
    return error;
  const int tiles = w.unit_stride / kTileRows + 2;
  const int rows = w.rows.kv_heads * w.batch;
  const int splits = SplitsOfWave(kCtasOfSm, rows, (tiles + kWarps - 1) / kWarps);
  return LaunchDependent(ScoreKernel<T, kDim, kDeviation>, dim3(splits, w.rows.kv_heads, w.batch),
                         kWarps * 32, kBytes, stream, w);
}

}  // namespace

int ScoreCuda(const ScoreBatch& w, Stream stream) {
  if (w.batch == 0 || w.unit_stride == 0) return cudaSuccess;
  if (w.fields < 1 || w.fields > 2 || (w.deviation && w.fields != 2) || w.rows.kv_heads < 1 ||
      w.query_heads % w.rows.kv_heads != 0 || w.query_heads > 8 * w.rows.kv_heads) {
    return cudaErrorInvalidValue;
  }
  return ForRows(w.rows.dtype, w.rows.head_dim, [&]<typename T, int kDim>() {
    return w.deviation ? Launch<T, kDim, true>(w, stream) : Launch<T, kDim, false>(w, stream);
  });
}

}  // namespace kvstrata::cuda
