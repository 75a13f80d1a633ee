// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/batches/powers_of_two.h"
#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/attend_chunk/tile_attention.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int32_t kWavesMax = 3;  // waves of CTAs that leave partials

// How every tile's strips are cut.
struct Cut {
  int32_t items;        // (tile, KV head)
  int32_t part_strips;  // a multiple of a block's
  int32_t parts;        // parts of the longest tile
};

// The most strips that a tile attends: those of the chunk's last token. By one warp.
__device__ __forceinline__ int32_t LongestStrips(const QueryTiles& tiles) {
  int32_t strips = 1;
  for (int head = threadIdx.x % 32; head < tiles.layer.kv_heads; head += 32) {
    strips = max(strips, AttendedRows::Of(tiles, tiles.rows - 1, head).strips());
  }
  return __reduce_max_sync(kAllLanes, strips);
}

// As many parts as make the time of all waves shortest, counted in strips. By one warp.
__device__ __forceinline__ Cut CutOf(int32_t strips, int32_t items, int32_t ctas, int32_t block) {
  constexpr int32_t kBeginCost = 8, kMergeCost = 1;  // strips a part; on an H100
  constexpr int32_t kPartsMax = 64;
  const auto part_strips = [=](int32_t parts) {
    return CeilDivide(CeilDivide(strips, parts), block) * block;
  };
  uint32_t best = ~0u;  // cost, then parts
  for (int32_t parts = 1 + threadIdx.x % 32; parts <= kPartsMax; parts += 32) {
    if (parts > 1 && items * parts > kWavesMax * ctas) continue;
    const int32_t waves = CeilDivide(items * parts, ctas);
    const int64_t cost = int64_t{waves} * (part_strips(parts) + kBeginCost) + parts * kMergeCost;
    best = min(best, static_cast<uint32_t>(min(cost, int64_t{UINT_MAX / 128 - 1})) * 128 + parts);
  }
  const int32_t each = part_strips(static_cast<int32_t>(__reduce_min_sync(kAllLanes, best) % 128));
  return {items, each, CeilDivide(strips, each)};
}

// Parts in an order in which CTAs that run at one time read the same rows, from the L2 then.
__device__ __forceinline__ void FindPart(const QueryTiles& tiles, const Cut& cut, int32_t index,
                                         TilePart& part) {
  const int32_t of_tile = index / cut.items, item = index % cut.items;
  part.tile = item / tiles.layer.kv_heads;
  part.head = item % tiles.layer.kv_heads;
  part.rows = AttendedRows::Of(tiles, tiles.LastToken(part.tile), part.head);
  const int32_t strips = part.rows.strips();
  part.begin = of_tile * cut.part_strips;
  part.first_slot = item;
  part.slot_step = cut.items;
  // An earlier tile may have a strip more than the last: of its only recent rows.
  part.parts = min(CeilDivide(strips, cut.part_strips), cut.parts);
  part.end = of_tile + 1 == part.parts ? strips : min(part.begin + cut.part_strips, strips);
}

// Part `index` of all: shared.part.
template <typename T, int kDim>
__device__ __forceinline__ void AttendPart(const TileArguments& a, int32_t index,
                                           TileShared<kDim>& shared) {
  const TilePart& part = shared.part;
  TileAttention<T, kDim> attention(a, shared);
  attention.Run();
  if (part.parts > 1) {
    attention.StorePartial(index);
    if (!ArrivesLast(a.counters + part.first_slot, part.parts, shared.is_last)) return;
    attention.Merge();
  } else {
    attention.ScaleMaxima();
  }
  attention.StoreOutput();
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kTileThreads, TileShape<kDim>::kCtasPerSm)
    AttendChunkKernel(const __grid_constant__ TileArguments a) {
  extern __shared__ __align__(1024) std::byte dynamic[];
  auto& shared = *reinterpret_cast<TileShared<kDim>*>(dynamic);
  __shared__ Cut cut;
  WaitForPrevious();
  LetNextStart();
  if (threadIdx.x < 32) {
    const int32_t strips = LongestStrips(a.tiles);
    const Cut found = CutOf(strips, a.tiles.tiles * a.tiles.layer.kv_heads, gridDim.x,
                            TileShape<kDim>::kBlockStrips);
    if (threadIdx.x == 0) cut = found;
  }
  __syncthreads();
  for (int32_t index = blockIdx.x; index < cut.items * cut.parts; index += gridDim.x) {
    if (threadIdx.x == 0) FindPart(a.tiles, cut, index, shared.part);
    __syncthreads();
    if (shared.part.begin < shared.part.end) AttendPart<T>(a, index, shared);
    __syncthreads();  // `shared` is read until here
  }
}

bool IsValid(const AttendChunkBatch& w) {
  const PagedLayer& l = w.layer;
  const DeviceSelection& s = w.selection;
  return l.dtype != DType::kF32 && IsPowerOfTwo(l.page_tokens) && l.slot_stride % 16 == 0 &&
         l.head_stride % 16 == 0 && l.key_offset % 16 == 0 && l.value_offset % 16 == 0 &&
         l.kv_heads > 0 && w.rows >= 0 && w.rows <= kAttendChunkRows && w.group >= 1 &&
         w.group <= 8 && w.q_stride % 16 == 0 &&
         (s.unit_tokens == 0 || IsPowerOfTwo(s.unit_tokens)) &&
         (s.groups == 1 || s.groups == l.kv_heads) && w.scale > 0 && w.to.rows != nullptr;
}

// CTAs that the current GPU holds at once, if its shared memory allows as many as its registers.
template <int kDim>
int32_t ResidentCtas() {
  const int32_t fit = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
                      (static_cast<int32_t>(sizeof(TileShared<kDim>)) + 2048);
  return DeviceAttribute(cudaDevAttrMultiProcessorCount) *
         (fit < TileShape<kDim>::kCtasPerSm ? fit : TileShape<kDim>::kCtasPerSm);
}

template <int kDim>
int64_t PartialRows() {
  return int64_t{kWavesMax} * ResidentCtas<kDim>() * TileShape<kDim>::kRows;
}

template <int kDim>
TileArguments ArgumentsOf(const AttendChunkBatch& w) {
  TileArguments a{};
  a.tiles.layer = w.layer;
  a.tiles.selection = w.selection;
  a.tiles.selection.shared = true;
  a.tiles.tokens = w.tokens;
  a.tiles.page_shift = Log2(w.layer.page_tokens);
  a.tiles.unit_shift = Log2(w.selection.unit_tokens);
  a.tiles.rows = w.rows;
  a.tiles.group = w.group;
  a.tiles.tile_rows = TileShape<kDim>::kRows;
  a.tiles.tiles = (w.rows * w.group + TileShape<kDim>::kRows - 1) / TileShape<kDim>::kRows;
  a.q = static_cast<const std::byte*>(w.q);
  a.q_stride = w.q_stride;
  a.scale = w.scale * kLog2E;
  a.to = w.to;
  a.counters = w.counters;
  a.partial_o = reinterpret_cast<float4*>(w.workspace);
  a.partial_ml = reinterpret_cast<float2*>(w.workspace + PartialRows<kDim>() * kDim);
  return a;
}

template <typename T, int kDim>
int Launch(const AttendChunkBatch& w, Stream stream) {
  constexpr int kBytes = sizeof(TileShared<kDim>);
  if (const int error = AllowShared(AttendChunkKernel<T, kDim>, kBytes); error != 0) return error;
  return LaunchDependent(AttendChunkKernel<T, kDim>, dim3(ResidentCtas<kDim>()), kTileThreads,
                         kBytes, stream, ArgumentsOf<kDim>(w));
}

}  // namespace

int64_t AttendChunkWorkspaceBytes(int32_t head_dim) {
  const int64_t rows = head_dim == 256   ? PartialRows<256>()
                       : head_dim == 128 ? PartialRows<128>()
                                         : PartialRows<64>();
  return rows * (head_dim + 2) * int64_t{sizeof(float)};
}

int AttendChunkCuda(const AttendChunkBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.rows == 0) return cudaSuccess;
  return ForRows(w.layer.dtype, w.layer.head_dim,
                 [&]<typename T, int kDim>() { return Launch<T, kDim>(w, stream); });
}

}  // namespace kvstrata::cuda
