// Warps attend strips (warp_attention.cuh), CTAs make partials of them, and the last CTA of an item
// merges those in their order.
#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/powers_of_two.h"
#include "kernels/ops/attend_raw/new_row.cuh"

namespace kvstrata::cuda {
namespace {

// The CTA's partial of an item, in shared memory: maxima, sums, and outputs of each warp.
template <typename T, int kDim>
__device__ __forceinline__ void AttendStrips(const Arguments& a, Shared<kDim>& shared) {
  const int warp = threadIdx.x / 32;
  const Turn& turn = shared.turn;
  WarpAttention<T, kDim> attention(a, turn.sequence, turn.head);
  attention.Run(a.rows, turn.rows, turn.sequence, turn.head, turn.begin, turn.end, turn.step);
  attention.SumWeights();
  attention.StoreSums(shared, warp);
  __syncthreads();
  if (threadIdx.x < kHeads) {
    float top = -INFINITY, sum = 0;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.m[w][threadIdx.x]);
    for (int w = 0; w < kWarps; ++w) {
      sum += WeightOf(shared.m[w][threadIdx.x], top) * shared.l[w][threadIdx.x];
    }
    shared.top[threadIdx.x] = top;
    shared.sum[threadIdx.x] = sum;
  }
  __syncthreads();
  attention.StoreOutput(shared, warp, a.group);
  __syncthreads();
}

template <int kDim>
__device__ __forceinline__ WeightedRow CtaRow(const Shared<kDim>& shared, int head, int column) {
  WeightedRow row{shared.top[head], shared.sum[head], {0, 0, 0, 0}};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 o = reinterpret_cast<const float4*>(shared.o[w][head])[column];
    row.o = {row.o.x + o.x, row.o.y + o.y, row.o.z + o.z, row.o.w + o.w};
  }
  return row;
}

template <int kDim>
__device__ void StoreSplit(const Arguments& a, const Shared<kDim>& shared, int32_t slot) {
  constexpr int kColumns = Shape<kDim>::kColumns;
#pragma unroll 1
  for (int i = threadIdx.x; i < a.group * kColumns; i += kThreads) {
    const int head = i / kColumns, column = i % kColumns;
    const WeightedRow row = CtaRow(shared, head, column);
    const int64_t at = int64_t{slot} * a.group + head;
    reinterpret_cast<float4*>(a.split_o)[at * kColumns + column] = row.o;
    if (column == 0) a.split_ml[at] = {row.m, row.l};
  }
}

// Maxima and sums of an item's splits, and each split's weight, in shared memory.
template <int kDim>
__device__ void WeighSplits(const Arguments& a, const Sharers& sharers, Shared<kDim>& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < a.group; head += kWarps) {
    float top = -INFINITY, sum = 0;
#pragma unroll 2
    for (int i = lane; i < sharers.count; i += 32) {
      const float2 ml = __ldcg(&a.split_ml[int64_t{sharers.Slot(i)} * a.group + head]);
      const float higher = fmaxf(top, ml.x);
      sum = WeightOf(top, higher) * sum + WeightOf(ml.x, higher) * ml.y;
      top = higher;
      shared.weight[head][i] = ml.x;
    }
    const float own = top;
    for (int step = 16; step > 0; step /= 2) {
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    }
    sum *= WeightOf(own, top);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
#pragma unroll 1
    for (int i = lane; i < sharers.count; i += 32) {
      shared.weight[head][i] = WeightOf(shared.weight[head][i], top);
    }
    if (lane == 0) shared.top[head] = top, shared.sum[head] = sum;
  }
  __syncthreads();
}

// Outputs of splits on their way: four channels of splits first, first + 1, ...
template <int kDim>
struct SplitLoads {
  static constexpr int kCount = 20;  // 2048 selected rows and those around them make 17
  float4 o[kCount];

  __device__ __forceinline__ void Load(const Arguments& a, const Sharers& sharers, int i,
                                       int first) {
    const int32_t stride = a.group * Shape<kDim>::kColumns;  // from a slot to the next
    const auto* from = reinterpret_cast<const float4*>(a.split_o) + i;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      o[j] = {0, 0, 0, 0};
      if (first + j < sharers.count) o[j] = __ldcg(from + sharers.Slot(first + j) * stride);
    }
  }
  __device__ __forceinline__ void AddTo(float4& sum, const float* weights, int count) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j >= count) continue;
      const float w = weights[j];
      sum = {sum.x + w * o[j].x, sum.y + w * o[j].y, sum.z + w * o[j].z, sum.w + w * o[j].w};
    }
  }
};

template <typename T, int kDim>
__device__ __forceinline__ FourChannels<T> NewValue(const Arguments& a, const Turn& turn, int i) {
  if (turn.rows.newest < 0) return {};
  return NewChannels<T>(a.new_v, turn.sequence, turn.head, i % Shape<kDim>::kColumns);
}

// Value i of the item ([query head][column of four channels]) to the output or to the partial.
// `sum`: over the rows on pages; new_value: the item's new row's, if it has one.
template <typename T, int kDim>
__device__ __forceinline__ void StoreResult(const Arguments& a, const Shared<kDim>& shared, int i,
                                            WeightedRow sum, const FourChannels<T>& new_value) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  const Turn& turn = shared.turn;
  const int head = i / kColumns;
  if (turn.rows.newest >= 0) sum.Add(shared.new_score[head], 1.0f, new_value.floats());
  const int64_t kv_heads = a.rows.layer.kv_heads;
  const int64_t row = (turn.sequence * kv_heads + turn.head) * a.group + head;
  StoreResult(a.with, a.to, a.partial, a.batch * kv_heads * a.group, row, kDim, i % kColumns, sum);
}

// The item's result from its splits, in their order. The first loads do not wait for weights.
template <typename T, int kDim>
__device__ __forceinline__ void MergeSplits(const Arguments& a, Shared<kDim>& shared) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  using Loads = SplitLoads<kDim>;
  const Sharers sharers = shared.turn.sharers;
  const int first_value = threadIdx.x;
  Loads loads;
  loads.Load(a, sharers, min(first_value, a.group * kColumns - 1), 0);
  FourChannels<T> new_value = NewValue<T, kDim>(a, shared.turn, first_value);
  if (shared.turn.rows.newest >= 0) ScoreNewRow<T>(a, shared);
  WeighSplits(a, sharers, shared);
#pragma unroll 1
  for (int i = first_value; i < a.group * kColumns; i += kThreads) {
    const int head = i / kColumns;
    WeightedRow row{shared.top[head], shared.sum[head], {0, 0, 0, 0}};
    if (i != first_value) new_value = NewValue<T, kDim>(a, shared.turn, i);
#pragma unroll 1
    for (int split = 0; split < sharers.count; split += Loads::kCount) {
      if (i != first_value || split != 0) loads.Load(a, sharers, i, split);
      loads.AddTo(row.o, &shared.weight[head][split], sharers.count - split);
    }
    StoreResult<T>(a, shared, i, row, new_value);
  }
}

// The item's result where one CTA has all of it.
template <typename T, int kDim>
__device__ __forceinline__ void StoreWhole(const Arguments& a, Shared<kDim>& shared) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  if (shared.turn.rows.newest >= 0) {
    ScoreNewRow<T>(a, shared);
    __syncthreads();
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < a.group * kColumns; i += kThreads) {
    StoreResult<T>(a, shared, i, CtaRow(shared, i / kColumns, i % kColumns),
                   NewValue<T, kDim>(a, shared.turn, i));
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void TakeTurn(const Arguments& a, Shared<kDim>& shared) {
  AttendStrips<T, kDim>(a, shared);
  const Turn& turn = shared.turn;
  const Sharers& sharers = turn.sharers;
  if (sharers.count > 1) {
    StoreSplit(a, shared, sharers.Slot(CtaIndex() - sharers.first));
    uint32_t* const counter = a.counters + turn.sequence * a.rows.layer.kv_heads + turn.head;
    if (ArrivesLast(counter, sharers.count, shared.is_last)) MergeSplits<T>(a, shared);
  } else {
    StoreWhole<T>(a, shared);
  }
  if (turn.rows.newest >= 0 && turn.begin == 0) StoreNewRow<T, kDim>(a, turn);
}

// Into the L2, where a selection may ask for any part of it: a line a thread.
__device__ __forceinline__ void PrefetchPageTable(const Arguments& a) {
  constexpr int32_t kLineEntries = 128 / sizeof(uint64_t);
  const int64_t lines = int64_t{a.batch} * a.rows.layer.page_stride / kLineEntries;
  const int64_t line = int64_t{CtaIndex()} * kThreads + threadIdx.x;
  if (line >= lines) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(a.rows.layer.pages + line * kLineEntries));
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, Shape<kDim>::kCtasPerSm)
    AttendKernel(const __grid_constant__ Arguments a) {
  __shared__ Shared<kDim> shared;
  if (a.ahead) {
    LetNextStart();
  } else {  // not before the first rows are on their way: what the next kernel reads is behind them
    PrefetchPageTable(a);
    WaitForPrevious();
  }
  if (a.batch == 1) {
    OnlyTurn(a.rows, shared.turn);
  } else {
    FirstTurn<kThreads>(a.rows, a.batch * a.rows.layer.kv_heads, shared.turn);
  }
  if (shared.turn.sequence < 0) return;
  do {
    TakeTurn<T, kDim>(a, shared);
  } while (a.batch > 1 && NextTurn(a.rows, shared.turn));
}

bool IsValid(const AttendRawBatch& w) {
  const PagedLayer& l = w.layer;
  const DeviceSelection& s = w.selection;
  return (l.head_dim == 64 || l.head_dim == 128 || l.head_dim == 256) && l.dtype != DType::kF32 &&
         IsPowerOfTwo(l.page_tokens) && l.slot_stride % 16 == 0 && l.head_stride % 16 == 0 &&
         l.key_offset % 16 == 0 && l.value_offset % 16 == 0 && l.kv_heads > 0 && w.batch >= 0 &&
         w.group >= 1 && w.group <= kHeads && w.q_stride % 16 == 0 &&
         (s.unit_tokens == 0 || IsPowerOfTwo(s.unit_tokens)) &&
         (s.groups == 1 || s.groups == l.kv_heads) &&
         (w.to.rows != nullptr || w.partial.o != nullptr) && w.new_k.IsAligned() &&
         w.new_v.IsAligned() && (w.new_k.data == nullptr) == (w.new_v.data == nullptr);
}

// CTAs that the current GPU holds at once.
template <int kDim>
int32_t ResidentCtas() {
  return min(DeviceAttribute(cudaDevAttrMultiProcessorCount) * Shape<kDim>::kCtasPerSm, kCtasMax);
}

int32_t ResidentCtas(int32_t head_dim) {
  return head_dim == 256   ? ResidentCtas<256>()
         : head_dim == 128 ? ResidentCtas<128>()
                           : ResidentCtas<64>();
}

// All CTAs that fit; of one sequence, as many for each KV head.
dim3 GridOf(const AttendRawBatch& w) {
  const int32_t ctas = ResidentCtas(w.layer.head_dim), heads = w.layer.kv_heads;
  return w.batch > 1 ? dim3(ctas) : dim3(ctas > heads ? ctas / heads : 1, heads);
}

int64_t SlotRows(int32_t group, int32_t head_dim) {
  return int64_t{2} * ResidentCtas(head_dim) * group;
}

Arguments ArgumentsOf(const AttendRawBatch& w) {
  Arguments a{};
  a.rows = {w.layer,
            w.selection,
            w.tokens,
            Log2(w.layer.page_tokens),
            Log2(w.selection.unit_tokens),
            w.new_k.data != nullptr};
  a.q = static_cast<const std::byte*>(w.q);
  a.q_stride = w.q_stride;
  a.scale = w.scale * kLog2E;
  a.batch = w.batch;
  a.group = w.group;
  a.ahead = w.ahead;
  a.new_k = w.new_k;
  a.new_v = w.new_v;
  a.with = w.with;
  a.to = w.to;
  a.partial = w.partial;
  a.counters = w.counters;
  a.split_o = w.workspace;
  a.split_ml = reinterpret_cast<float2*>(w.workspace +
                                         SlotRows(w.group, w.layer.head_dim) * w.layer.head_dim);
  return a;
}

}  // namespace

int64_t AttendRawWorkspaceBytes(int32_t group, int32_t head_dim) {
  return SlotRows(group, head_dim) * (head_dim + 2) * int64_t{sizeof(float)};
}

int AttendRawCuda(const AttendRawBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  const Arguments a = ArgumentsOf(w);
  return ForRows(w.layer.dtype, w.layer.head_dim, [&]<typename T, int kDim>() {
    return LaunchDependent(AttendKernel<T, kDim>, GridOf(w), kThreads, 0, stream, a);
  });
}

}  // namespace kvstrata::cuda
