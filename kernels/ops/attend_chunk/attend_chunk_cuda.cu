#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/ops/attend_chunk/tile_attention.cuh"

namespace kvstrata::cuda {
namespace {

template <typename T, int kDim>
__device__ __forceinline__ void TakeTurn(const TileArguments& a, TileShared<kDim>& shared) {
  TileAttention<T, kDim> attention(a, shared);
  attention.Run();
  const Turn& turn = shared.turn;
  const Sharers& sharers = turn.sharers;
  if (sharers.count > 1) {
    attention.StoreSplit(sharers.Slot(CtaIndex() - sharers.first));
    const int32_t item = turn.sequence * a.tiles.layer.kv_heads + turn.head;
    if (!ArrivesLast(a.counters + item, sharers.count, shared.is_last)) return;
    attention.Merge(sharers);
  } else {
    attention.ScaleMaxima();
  }
  attention.StoreOutput();
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kTileThreads, TileShape<kDim>::kCtasPerSm)
    AttendChunkKernel(const __grid_constant__ TileArguments a, int32_t items) {
  extern __shared__ __align__(1024) std::byte dynamic[];
  auto& shared = *reinterpret_cast<TileShared<kDim>*>(dynamic);
  WaitForPrevious();
  LetNextStart();
  FirstTurn<kTileThreads>(a.tiles, items, shared.turn);
  if (shared.turn.sequence < 0) return;
  do {
    TakeTurn<T, kDim>(a, shared);
  } while (NextTurn(a.tiles, shared.turn));
}

bool IsPowerOfTwo(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }
int32_t Log2(int32_t x) { return x <= 1 ? 0 : 31 - __builtin_clz(static_cast<unsigned>(x)); }

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
int64_t SplitRows() {
  return int64_t{2} * ResidentCtas<kDim>() * TileShape<kDim>::kRows;
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
  a.q = static_cast<const std::byte*>(w.q);
  a.q_stride = w.q_stride;
  a.scale = w.scale * kLog2E;
  a.to = w.to;
  a.counters = w.counters;
  a.split_o = reinterpret_cast<float4*>(w.workspace);
  a.split_ml = reinterpret_cast<float2*>(w.workspace + SplitRows<kDim>() * kDim);
  return a;
}

template <typename T, int kDim>
int Launch(const AttendChunkBatch& w, Stream stream) {
  constexpr int kBytes = sizeof(TileShared<kDim>);
  if (const int error = AllowShared(AttendChunkKernel<T, kDim>, kBytes); error != 0) return error;
  const int32_t tiles = (w.rows * w.group + TileShape<kDim>::kRows - 1) / TileShape<kDim>::kRows;
  return LaunchDependent(AttendChunkKernel<T, kDim>, dim3(ResidentCtas<kDim>()), kTileThreads,
                         kBytes, stream, ArgumentsOf<kDim>(w), tiles * w.layer.kv_heads);
}

}  // namespace

int64_t AttendChunkWorkspaceBytes(int32_t head_dim) {
  const int64_t rows = head_dim == 256   ? SplitRows<256>()
                       : head_dim == 128 ? SplitRows<128>()
                                         : SplitRows<64>();
  return rows * (head_dim + 2) * int64_t{sizeof(float)};
}

int AttendChunkCuda(const AttendChunkBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.rows == 0) return cudaSuccess;
  return ForRows(w.layer.dtype, w.layer.head_dim,
                 [&]<typename T, int kDim>() { return Launch<T, kDim>(w, stream); });
}

}  // namespace kvstrata::cuda
