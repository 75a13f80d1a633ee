// SPDX-License-Identifier: Apache-2.0
// Floor on an H100 (3.0 TB/s): 8 KV heads x 128, 43 spans per 1000 tokens: 11.5 / 92 MB of mean
// keys and 1.5 / 12 MB of norms and scores at 128K / 1M tokens, 4.3 / 35 us. Predicted, with 3 us
// for the launch and the routed queries: 8 / 39 us. Measured: 11 / 40 us.
#include <algorithm>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/plans/sekv/ops/attend_spans/row_tiles.cuh"
#include "kernels/plans/sekv/ops/attend_spans/score_spans_cuda.h"
#include "kernels/plans/sekv/ops/attend_spans/span_parts.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kHeads = 8;

// One CTA an SM, as every CTA routes the queries.
template <int kDim>
struct Shape {
  static constexpr int kWarps = kDim == 256 ? 8 : 16;
  static constexpr int kThreads = 32 * kWarps;
};

template <int kDim>
struct Shared {
  QueryFragments<kDim> routed, given;
  int32_t parts;
  alignas(16) float pulled[kHeads][kDim];
  float routes[kHeads][kDim];  // W q
};

// pulled = W^T W q / sqrt(d') of the KV head's queries. By all threads; barrier before, and after.
template <typename T, int kDim>
__device__ void RouteQueries(const SpanLayer& l, const SpanRouter& router, const T* q, int head,
                             Shared<kDim>& shared) {
  constexpr int kWarps = Shape<kDim>::kWarps, kLanes = kDim / 32;
  const int lane = threadIdx.x % 32, routes = router.d_route, group = l.group;
  const float scale = rsqrtf(static_cast<float>(routes));
  for (int g = 0; g < group; ++g) {
    const int at = l.layer * router.routers + head * group + g;
    const float* w = reinterpret_cast<const float*>(router.w) + int64_t{at} * routes * kDim;
#pragma unroll 2
    for (int r = threadIdx.x / 32; r < routes; r += kWarps) {
      float x[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) x[i] = w[r * kDim + 32 * i + lane];
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) sum += x[i] * FloatOf(q[g * kDim + 32 * i + lane]);
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
      if (lane == 0) shared.routes[g][r] = sum;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < kDim; c += Shape<kDim>::kThreads) {
      float sum = 0;
#pragma unroll 16
      for (int r = 0; r < routes; ++r) sum += shared.routes[g][r] * w[r * kDim + c];
      shared.pulled[g][c] = sum * scale;
    }
  }
  __syncthreads();
}

// Asks the L2 for a KV head's routers, if there are any.
template <int kDim>
__device__ __forceinline__ void PrefetchRouters(const SpanLayer& l, const SpanRouter& router,
                                                int head) {
  const int of_head = router.routers / l.kv_heads;
  const int64_t bytes = int64_t{router.d_route} * kDim * static_cast<int>(sizeof(float));
  const uint64_t from = router.w + (int64_t{l.layer} * router.routers + head * of_head) * bytes;
  for (int64_t at = 128 * static_cast<int>(threadIdx.x); at < of_head * bytes;
       at += 128 * Shape<kDim>::kThreads) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
}

// A warp's tiles of one sequence.
template <int kWarps>
class TileCursor {
 public:
  __device__ __forceinline__ TileCursor(const SpanParts& parts)
      : parts_(parts), step_(gridDim.x * kWarps) {
    tile_ = blockIdx.x * kWarps + threadIdx.x / 32;
  }
  // The next tile's part and first span in it; null: no more.
  __device__ __forceinline__ const SpanPart* Next(int32_t* local) {
    if (tile_ >= parts_.tiles()) return nullptr;
    int32_t tile = tile_;
    tile_ += step_;
    const SpanPart& part = parts_.OfTile(tile);
    *local = tile * kSpanTileRows;
    return &part;
  }

 private:
  const SpanParts& parts_;
  const int32_t step_;
  int32_t tile_;
};

// Grid (splits, kv_heads, batch).
template <typename T, int kDim>
__global__ void __launch_bounds__(Shape<kDim>::kThreads, 1)
    ScoreSpansKernel(const __grid_constant__ ScoreSpansBatch w) {
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<Shared<kDim>*>(SpanParts::Behind(dynamic, w.layer));
  const SpanParts parts(dynamic, shared.parts);
  using Mean = __nv_bfloat16;
  const SpanLayer& l = w.layer;
  const int head = blockIdx.y, sequence = blockIdx.z, group = l.group;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool wide = group > 4;
  LetNextStart();
  if (!w.ahead) WaitForPrevious();
  parts.Load(l, sequence);
  __syncthreads();
  KeyTile<kDim> keys;
  TileCursor<Shape<kDim>::kWarps> cursor(parts);
  int32_t local = 0;
  const SpanPart* part = cursor.Next(&local);
  const bool empty = parts.count == 0;
  const bool routed = !empty && l.routers[sequence].routers > 0;
  const int first_head = LaneQuery(lane, wide);
  float norms[4];      // norms by the lane's rows and heads; for routed queries alone
  int32_t lengths[2];  // lengths of rows g and g + 8
  const auto load = [&] {
    if (part == nullptr) return;
    const int32_t rows = min(part->span_count - local, kSpanTileRows);
    keys.Load(
        {MeansOf(l, *part, head, part->k_mean) + int64_t{local} * kDim * 2, kDim * 2, 0, rows});
    lengths[0] = SpanLength(*part, local + min(g, rows - 1));
    lengths[1] = SpanLength(*part, local + min(g + 8, rows - 1));
    if (!routed) return;
    const auto* from = reinterpret_cast<const float*>(part->inverse_norms) +
                       int64_t{l.layer} * l.kv_heads * group * part->span_count + local;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query_head = head * group + min(first_head + (i & 1), group - 1);
      norms[i] = from[int64_t{query_head} * part->span_count + min(g + 8 * (i >> 1), rows - 1)];
    }
  };
  load();
  if (w.ahead) {
    if (routed) PrefetchRouters<kDim>(l, l.routers[sequence], head);
    WaitForPrevious();
  }
  if (empty) return;
  const auto* q = reinterpret_cast<const T*>(static_cast<const std::byte*>(w.queries.q) +
                                             sequence * w.queries.stride) +
                  head * group * kDim;
  if (routed) {
    RouteQueries<T, kDim>(l, l.routers[sequence], q, head, shared);
    LoadQueries<Mean>(&shared.routed, shared.pulled, DType::kF32, 0, group, 1);
  }
  LoadQueries<Mean>(&shared.given, q, l.dtype, 0, group, 1);
  __syncthreads();

  while (part != nullptr) {
    float relevance[4], coarse[4];
    if (routed) keys.template Score<Mean>(shared.routed, wide, relevance);
    keys.template Score<Mean>(shared.given, wide, coarse);
    const float logs[2] = {logf(static_cast<float>(lengths[0])),
                           logf(static_cast<float>(lengths[1]))};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      coarse[i] = coarse[i] * w.queries.scale + logs[i >> 1];
      relevance[i] = routed ? relevance[i] * norms[i] + logs[i >> 1] : coarse[i];
    }
    const int32_t begin = FirstSpan(*part) + local, rows = part->span_count - local;
    part = cursor.Next(&local);
    load();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_group = first_head + (i & 1), row = g + 8 * (i >> 1);
      if (of_group >= group || row >= rows) continue;
      const int64_t query_head = (int64_t{sequence} * l.kv_heads + head) * group + of_group;
      const int64_t at = query_head * l.span_stride + begin + row;
      // With up to 4 heads, lanes t < 2 write relevance, the others coarse.
      if (wide || t < 2) w.relevance[at] = relevance[i];
      if (wide || t >= 2) w.coarse[at] = coarse[i];
    }
  }
}

template <typename T, int kDim>
int Launch(const ScoreSpansBatch& w, Stream stream) {
  const int bytes = SpanParts::BytesOf(w.layer) + int{sizeof(Shared<kDim>)};
  const auto kernel = ScoreSpansKernel<T, kDim>;
  if (const int error = AllowShared(kernel, bytes); error != 0) return error;
  const int items = w.layer.kv_heads * w.queries.batch;
  constexpr int kWarps = Shape<kDim>::kWarps;
  const int ctas = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int tiles = w.layer.span_stride / kSpanTileRows + w.layer.part_stride;
  const int splits = std::clamp((tiles + kWarps - 1) / kWarps, 1, std::max(ctas / items, 1));
  return LaunchDependent(kernel, dim3(splits, w.layer.kv_heads, w.queries.batch),
                         Shape<kDim>::kThreads, bytes, stream, w);
}

}  // namespace

int ScoreSpansCuda(const ScoreSpansBatch& w, Stream stream) {
  if (!IsValid(w.layer, w.queries)) return cudaErrorInvalidValue;
  if (w.queries.batch == 0 || w.layer.part_stride == 0) return cudaSuccess;
  return ForRows(w.layer.dtype, w.layer.head_dim,
                 [&]<typename T, int kDim>() { return Launch<T, kDim>(w, stream); });
}

}  // namespace kvstrata::cuda
