// SPDX-License-Identifier: Apache-2.0
// Warps take units of work of one (sequence, KV head) in turn: tiles of 16 raw rows and of rows on
// pages, then expanded spans, then tiles of coarse rows. CTAs sum their warps, and the last CTA of
// an item merges.
//
// Floor on an H100 (3.0 TB/s), 8 KV heads x 128 and 4 query heads each, of 1000 tokens 70 raw, 43
// spans, 20 rows of expansions a query head: raw rows 36 / 293 MB at 128K / 1M tokens, coarse rows
// 11.5 / 92 MB, scores 0.7 / 6 MB, factors 9 / 74 MB where the heads of a group agree, four times
// as much where no two do: 19 to 28 / 155 to 229 us. Read ahead, raw rows and expand_spans take the
// longer of 12 / 98 us and of what that one takes. Measured with that: 40 to 51 / 177 to 242 us for
// both (bench/notes/cuda.md).
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/merge/shared_item.cuh"
#include "kernels/plans/sekv/ops/attend_spans/attend_spans_cuda.h"
#include "kernels/plans/sekv/ops/attend_spans/span_parts.cuh"
#include "kernels/plans/sekv/ops/attend_spans/warp_spans.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kHeads = 8;

template <int kDim>
struct Shape {
  static constexpr int kThreads = kDim == 256 ? 256 : 384;  // one CTA an SM
  static constexpr int kWarps = kThreads / 32;
};

struct Arguments {
  AttendSpansBatch work;
  float scale;       // with log2(e)
  Partials splits;   // what an item's CTAs leave, in the workspace
  int32_t row_ctas;  // how many of them, from the first on, may attend rows
};

// Units of work of one sequence that lie on pages; others are tiles of parts, and spans.
struct Units {
  int32_t window;
  int32_t first_row, end_row;  // on pages
};

// A piece of an expanded span.
struct SpanPiece {
  uint64_t k, v;   // where its factors begin
  int32_t n;       // tokens of the span
  uint32_t which;  // heads, the piece, and ranks + 1: 8, 4, 10 and 10 bits

  static constexpr uint32_t kRankMask = 1023;
  __device__ __forceinline__ SpanPiece Of(int lane) const {
    return {__shfl_sync(kAllLanes, k, lane), __shfl_sync(kAllLanes, v, lane),
            __shfl_sync(kAllLanes, n, lane), __shfl_sync(kAllLanes, which, lane)};
  }
  __device__ __forceinline__ uint32_t heads() const { return which & 0xFF; }
  __device__ __forceinline__ int32_t piece() const { return which >> 8 & 15; }
  __device__ __forceinline__ FactorPair keys() const {
    return FactorPair::At(k, n, static_cast<int32_t>(which >> 12 & kRankMask) - 1);
  }
  __device__ __forceinline__ FactorPair values() const {
    return FactorPair::At(v, n, static_cast<int32_t>(which >> 22) - 1);
  }
};

template <int kDim>
struct Shared {
  int32_t parts;
  Units units;
  QueryFragments<kDim> factor, native;
  float m[Shape<kDim>::kWarps][kHeads], l[Shape<kDim>::kWarps][kHeads];
  float top[kHeads], sum[kHeads];
  bool is_last;
};

// Called by one thread.
__device__ __forceinline__ void CountUnits(const AttendSpansBatch& w, int sequence, Units& units) {
  units.end_row = max(w.tokens[sequence], 0);
  units.first_row = min(max(w.window_begin[sequence], 0), units.end_row);
  units.window =
      (units.end_row + kSpanTileRows - 1) / kSpanTileRows - units.first_row / kSpanTileRows;
}

template <typename T, int kDim>
class UnitVisitor {
 public:
  __device__ __forceinline__ UnitVisitor(const AttendSpansBatch& w, int sequence, int head,
                                         const SpanParts& parts, const Units& units,
                                         WarpSpans<T, kDim>& warp)
      : w_(w), sequence_(sequence), head_(head), parts_(parts), units_(units), warp_(warp) {}

  // All of these: units first, first + step, ...
  __device__ __forceinline__ void VisitRows(int32_t first, int32_t step) {
    int32_t i = first;
    const int32_t raw = parts_.raw_tiles();
#pragma unroll 1
    for (; i < raw; i += step) Raw(i);
    i -= raw;
#pragma unroll 1
    for (; i < units_.window; i += step) Window(i);
  }
  __device__ __forceinline__ void VisitSpans(int32_t expanded, int32_t first, int32_t step) {
    int32_t i = first;
#pragma unroll 1
    for (; i < expanded; i += 32 * step) Expanded(expanded, i, step);
    // The first unit that was none of these.
    i = first >= expanded ? first : first + (expanded - first + step - 1) / step * step;
    i -= expanded;
    const int32_t coarse = parts_.tiles();
#pragma unroll 1
    for (; i < coarse; i += step) Coarse(i);
  }
  __device__ __forceinline__ int32_t RowUnits() const { return parts_.raw_tiles() + units_.window; }

 private:
  __device__ __forceinline__ int64_t Item() const {
    return int64_t{sequence_} * w_.layer.kv_heads + head_;
  }
  // Up to 32 pieces, first, first + step, ... of `count`: each lane looks one up.
  __device__ __forceinline__ void Expanded(int32_t count, int32_t first, int32_t step) {
    const int32_t pieces = min((count - first + step - 1) / step, 32);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const SpanPiece own = Find(first + min(lane, pieces - 1) * step);
#pragma unroll 1
    for (int32_t i = 0; i < pieces; ++i) {
      const SpanPiece p = own.Of(i);
      const FactorPair k = p.keys(), v = p.values();
      Prefetch(k);
      Prefetch(v);
      warp_.AddSpan(k, v, p.n, p.heads(), p.piece() * kSpanTileRows,
                    SpanPieces(p.n) * kSpanTileRows);
    }
  }
  // Entry i of the list.
  __device__ __forceinline__ SpanPiece Find(int32_t i) const {
    const SpanLayer& l = w_.layer;
    const uint32_t* list = w_.list + Item() * kSpanPieces * l.span_stride;
    const uint32_t entry = list[i];
    uint32_t piece = 0;  // as many entries before are of the same span
#pragma unroll
    for (int back = 1; back < kSpanPieces; ++back)
      piece += list[max(i - back, 0)] == entry && i >= back;
    auto local = static_cast<int32_t>(entry >> 8);
    const SpanPart& part = parts_.OfSpan(local);
    const SpanFactors f = reinterpret_cast<const SpanFactors*>(
        part.entries)[(int64_t{l.layer} * l.kv_heads + head_) * part.span_count + local];
    return {part.factors + f.k, part.factors + f.v, SpanLength(part, local),
            (entry & 0xFF) | piece << 8 | static_cast<uint32_t>(f.k_rank + 1) << 12 |
                static_cast<uint32_t>(f.v_rank + 1) << 22};
  }
  // Asks the L2 for a factored side: its arrays are read one after the other.
  static __device__ __forceinline__ void Prefetch(const FactorPair& x) {
    if (x.rank < 0) return;
    const uint64_t end = x.right + static_cast<uint64_t>(x.rank) * kDim * 2;
#pragma unroll 1
    for (uint64_t at = x.left / 128 * 128 + 128 * (threadIdx.x % 32); at < end; at += 128 * 32) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
  }
  __device__ __forceinline__ void Raw(int32_t tile) {
    const SpanLayer& l = w_.layer;
    const SpanPart& part = parts_.OfRawTile(tile);
    const int64_t head_bytes = int64_t{part.raw_count} * kDim * 2;
    const int32_t first = tile * kSpanTileRows;
    const uint64_t keys = part.raw_rows + (int64_t{l.layer} * 2 * l.kv_heads + head_) * head_bytes +
                          int64_t{first} * kDim * 2;
    const int32_t rows = min(part.raw_count - first, kSpanTileRows);
    warp_.AddRows({keys, kDim * 2, 0, rows}, {keys + l.kv_heads * head_bytes, kDim * 2, 0, rows});
  }
  __device__ __forceinline__ void Coarse(int32_t tile) {
    const SpanLayer& l = w_.layer;
    const SpanPart& part = parts_.OfTile(tile);
    const int32_t first = tile * kSpanTileRows;
    const float* logits = w_.coarse + Item() * l.group * l.span_stride + FirstSpan(part) + first;
    const uint64_t values = MeansOf(l, part, head_, part.v_mean) + int64_t{first} * kDim * 2;
    warp_.AddCoarse(logits, l.span_stride,
                    {values, kDim * 2, 0, min(part.span_count - first, kSpanTileRows)});
  }
  __device__ __forceinline__ void Window(int32_t tile) {
    const PagedLayer& p = w_.pages;
    const Units& units = units_;
    const int32_t at = (units.first_row / kSpanTileRows + tile) * kSpanTileRows;
    const int32_t page = at / p.page_tokens;
    const uint64_t slot = p.pages[int64_t{sequence_} * p.page_stride + page] +
                          head_ * p.head_stride + (at - page * p.page_tokens) * p.slot_stride;
    const int32_t first = max(units.first_row - at, 0),
                  last = min(units.end_row - at, kSpanTileRows);
    warp_.AddRows({slot + p.key_offset, p.slot_stride, first, last},
                  {slot + p.value_offset, p.slot_stride, first, last});
  }

  const AttendSpansBatch& w_;
  const int sequence_, head_;
  const SpanParts& parts_;
  const Units& units_;
  WarpSpans<T, kDim>& warp_;
};

// The CTA's maxima and sums of weights in `shared`, its sums of rows in scratch
// [warps][group][kDim] relative to the maxima. A head that saw no row has the maximum -inf.
template <typename T, int kDim>
__device__ __forceinline__ void SumWarps(WarpSpans<T, kDim>& spans, int group, float* scratch,
                                         Shared<kDim>& shared) {
  constexpr int kWarps = Shape<kDim>::kWarps;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  auto& softmax = spans.softmax();
  softmax.SumWeights();
  if (g == 0) {
    for (int i = 0; i < 2; ++i) {
      shared.m[warp][2 * t + i] = softmax.m[i];
      shared.l[warp][2 * t + i] = softmax.l[i];
    }
  }
  __syncthreads();
  if (threadIdx.x < kHeads) {
    const int head = threadIdx.x;
    float top = kNoMaximum, sum = 0;
    for (int i = 0; i < kWarps; ++i) top = fmaxf(top, shared.m[i][head]);
    for (int i = 0; i < kWarps; ++i) sum += exp2f(shared.m[i][head] - top) * shared.l[i][head];
    shared.top[head] = sum == 0 ? -INFINITY : top;
    shared.sum[head] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = 2 * t + i;
    if (head >= group) continue;
    const float weight = shared.sum[head] == 0 ? 0.0f : exp2f(softmax.m[i] - shared.top[head]);
    float* to = scratch + (warp * group + head) * kDim + 8 * g;
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      *reinterpret_cast<float2*>(to + 64 * (j / 4) + 2 * (j % 4)) = {weight * softmax.o[j][i],
                                                                     weight * softmax.o[j][2 + i]};
    }
  }
  __syncthreads();
}

template <int kDim>
__device__ __forceinline__ WeightedRow CtaRow(const Shared<kDim>& shared, const float* scratch,
                                              int group, int head, int column) {
  WeightedRow row{shared.top[head], shared.sum[head], {0, 0, 0, 0}};
#pragma unroll 4
  for (int warp = 0; warp < Shape<kDim>::kWarps; ++warp) {
    const float4 o =
        reinterpret_cast<const float4*>(scratch + (warp * group + head) * kDim)[column];
    row.o = {row.o.x + o.x, row.o.y + o.y, row.o.z + o.z, row.o.w + o.w};
  }
  return row;
}

// Grid (items, CTAs of an item).
template <typename T, int kDim>
__global__ void __launch_bounds__(Shape<kDim>::kThreads, 1)
    AttendSpansKernel(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<Shared<kDim>*>(SpanParts::Behind(dynamic, a.work.layer));
  const SpanParts parts(dynamic, shared.parts);
  auto* const scratch = reinterpret_cast<float*>(&shared + 1);
  constexpr bool kOneKind = std::is_same_v<T, __nv_bfloat16>;  // one kind of queries serves both
  constexpr int kWarps = Shape<kDim>::kWarps;
  const AttendSpansBatch& w = a.work;
  const auto item = static_cast<int32_t>(blockIdx.x);
  const int head = item % w.layer.kv_heads, sequence = item / w.layer.kv_heads;
  const int group = w.layer.group, warp = threadIdx.x / 32;
  if (!w.ahead) WaitForPrevious();
  LetNextStart();
  parts.Load(w.layer, sequence);
  const auto* q = static_cast<const std::byte*>(w.queries.q) + sequence * w.queries.stride;
  const int64_t first_element = int64_t{head} * group * kDim;
  LoadQueries<__nv_bfloat16>(&shared.factor, q, w.layer.dtype, first_element, group, 1);
  if (!kOneKind) LoadQueries<T>(&shared.native, q, w.layer.dtype, first_element, group, 1);
  if (threadIdx.x == 0) CountUnits(w, sequence, shared.units);
  __syncthreads();

  WarpSpans<T, kDim> spans(kOneKind ? shared.factor : shared.native, shared.factor, group, a.scale);
  UnitVisitor<T, kDim> visitor(w, sequence, head, parts, shared.units, spans);
  // Neighbouring units go to different SMs.
  const auto cta = static_cast<int32_t>(blockIdx.y);
  const auto sharers_of = [](int32_t units, int32_t ctas) {
    return min(max((units + kWarps - 1) / kWarps, 1), ctas);
  };
  const int32_t row_sharers = sharers_of(visitor.RowUnits(), a.row_ctas);
  if (cta < row_sharers) visitor.VisitRows(warp * row_sharers + cta, row_sharers * kWarps);
  if (w.ahead) WaitForPrevious();
  const int32_t expanded = w.counts[item];
  const int32_t sharers =
      sharers_of(visitor.RowUnits() + expanded + parts.tiles(), static_cast<int32_t>(gridDim.y));
  if (cta >= sharers) return;
  visitor.VisitSpans(expanded, warp * sharers + cta, sharers * kWarps);
  SumWarps(spans, group, scratch, shared);

  const int64_t rows = int64_t{w.queries.batch} * w.layer.kv_heads * group;
  const SharedItem end{rows,     int64_t{item} * group, group, cta, sharers,
                       a.splits, w.counters + item};
  FinishItem<Shape<kDim>::kThreads, kDim>(
      end, [&](int of_head, int column) { return CtaRow(shared, scratch, group, of_head, column); },
      [&](int64_t row, int column, const WeightedRow& sum) {
        StoreResult(w.with, w.to, w.partial, rows, row, kDim, column, sum);
      },
      reinterpret_cast<WeightedRow*>(scratch), shared.is_last);
}

// CTAs that share an item.
int32_t CtasOf(const AttendSpansBatch& w) {
  const int32_t items = w.layer.kv_heads * w.queries.batch;
  return std::max(1, DeviceAttribute(cudaDevAttrMultiProcessorCount) / std::max(items, 1));
}

// CTAs of an item that start while expand_spans runs, which has a CTA a query head, each on an SM
// of its own: the others have enough to do with spans. All, where none is left.
int32_t RowCtasOf(const AttendSpansBatch& w) {
  const int32_t ctas = CtasOf(w), early = ctas - w.layer.group;
  return w.ahead && early >= 1 ? early : ctas;
}

int64_t SplitRows(const AttendSpansBatch& w) {
  return int64_t{CtasOf(w)} * w.queries.batch * w.layer.kv_heads * w.layer.group;
}

template <typename T, int kDim>
int Launch(const AttendSpansBatch& w, Stream stream) {
  const auto kernel = AttendSpansKernel<T, kDim>;
  const int of_warps = Shape<kDim>::kWarps * w.layer.group * kDim * static_cast<int>(sizeof(float));
  const int bytes = SpanParts::BytesOf(w.layer) + static_cast<int>(sizeof(Shared<kDim>)) +
                    std::max(of_warps, Shape<kDim>::kThreads * kSumBytes);
  if (const int error = AllowShared(kernel, bytes); error != 0) return error;
  Arguments a{w, w.queries.scale * kLog2E, {}};
  a.splits.o = w.workspace;
  a.splits.m = w.workspace + SplitRows(w) * kDim;
  a.splits.l = a.splits.m + SplitRows(w);
  a.row_ctas = RowCtasOf(w);
  return LaunchDependent(kernel, dim3(w.layer.kv_heads * w.queries.batch, CtasOf(w)),
                         Shape<kDim>::kThreads, static_cast<size_t>(bytes), stream, a);
}

bool IsValid(const AttendSpansBatch& w) {
  const PagedLayer& p = w.pages;
  return IsValid(w.layer, w.queries) && p.kv_heads == w.layer.kv_heads &&
         p.head_dim == w.layer.head_dim && p.dtype == w.layer.dtype &&
         p.page_tokens % kSpanTileRows == 0 && p.slot_stride % 16 == 0 && p.head_stride % 16 == 0 &&
         p.key_offset % 16 == 0 && p.value_offset % 16 == 0 &&
         (w.to.rows != nullptr || w.partial.o != nullptr);
}

}  // namespace

int64_t AttendSpansWorkspaceBytes(const AttendSpansBatch& w) {
  return SplitRows(w) * (w.layer.head_dim + 2) * int64_t{sizeof(float)};
}

int AttendSpansCuda(const AttendSpansBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.queries.batch == 0) return cudaSuccess;
  return ForRows(w.layer.dtype, w.layer.head_dim,
                 [&]<typename T, int kDim>() { return Launch<T, kDim>(w, stream); });
}

}  // namespace kvstrata::cuda
