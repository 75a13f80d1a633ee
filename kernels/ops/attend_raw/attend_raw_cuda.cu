// SPDX-License-Identifier: Apache-2.0
// Warps attend strips (warp_attention.cuh), CTAs make splits of them and post those to the CTAs
// that merge them (split_exchange.cuh).
#include "kernels/cuda/batches/powers_of_two.h"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/attend_raw/kept_queries.cuh"
#include "kernels/ops/attend_raw/new_row.cuh"
#include "kernels/ops/attend_raw/split_exchange.cuh"

namespace kvstrata::cuda {
namespace {

// The partial of an item of each warp, in shared memory.
template <typename T, int kDim>
__device__ __forceinline__ void AttendStrips(const Arguments& a, Shared<kDim>& shared) {
  const int warp = threadIdx.x / 32;
  const CtaTask& task = shared.task;
  WarpAttention<T, kDim> attention(a, shared, task.sequence, task.head);
  attention.Run(a.rows, task.rows, task.sequence, task.head, task.begin, task.end, task.step);
  attention.SumWeights();
  attention.Store(shared, warp, a.group);
  __syncthreads();
}

template <typename T, int kDim>
__device__ __forceinline__ FourChannels<T> NewValue(const Arguments& a, const CtaTask& task,
                                                    int i) {
  if (task.rows.newest < 0) return {};
  return NewChannels<T>(a.new_v, task.sequence, task.head, i % Shape<kDim>::kColumns);
}

// Value i of the item ([query head][column of four channels]) to the output or to the partial.
// `sum`: over the rows on pages; new_value: the item's new row's, if it has one.
template <typename T, int kDim>
__device__ __forceinline__ void StoreResult(const Arguments& a, const Shared<kDim>& shared, int i,
                                            WeightedRow sum, const FourChannels<T>& new_value) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  const CtaTask& task = shared.task;
  const int head = i / kColumns;
  if (task.rows.newest >= 0) sum.Add(shared.new_score[head], 1.0f, new_value.floats());
  const int64_t kv_heads = a.rows.layer.kv_heads;
  const int64_t row = (task.sequence * kv_heads + task.head) * a.group + head;
  StoreResult(a.with, a.to, a.partial, a.batch * kv_heads * a.group, row, kDim, i % kColumns, sum);
}

// Output of the heads that this CTA merges, from its own split and the others', in their order.
// Teams of threads have a column each; those that are left share the splits of a head.
template <typename T, int kDim>
__device__ __forceinline__ void MergeSplits(const Arguments& a, Shared<kDim>& shared) {
  constexpr int kColumns = Shape<kDim>::kColumns, kTeams = kThreads / kColumns;
  const CtaTask& task = shared.task;
  const int heads = CeilDivide(a.group - task.merger, task.mergers);
  int parts = kTeams;
  while (parts > 1 && parts * heads > kTeams) parts /= 2;
  const int team = threadIdx.x / kColumns, column = threadIdx.x % kColumns, part = team % parts;
  if (task.rows.newest >= 0) ScoreNewRow<T>(a, shared);
#pragma unroll 1
  for (int h = team / parts; h - team / parts < heads; h += kTeams / parts) {
    const int head = task.merger + min(h, heads - 1) * task.mergers;
    const int value = head * kColumns + column;
    const FourChannels<T> new_value = NewValue<T, kDim>(a, task, value);
    WeightedRow row;
    if (part == 0) row = CtaRow(shared, head, column);
    if (h < heads) AwaitSplits<kDim>(a, task, head, column, part, parts, row);
    shared.part_o[threadIdx.x] = row.o;
    shared.part_ml[threadIdx.x] = {row.m, row.l};
    __syncthreads();
    if (h >= heads) continue;
    if (part == parts - 1) EmptySums(a, task, head, column, kColumns);
    if (part != 0) continue;
#pragma unroll 1
    for (int i = 1; i < parts; ++i) {
      const int other = threadIdx.x + i * kColumns;
      row.Add(shared.part_ml[other].x, shared.part_ml[other].y, shared.part_o[other]);
    }
    StoreResult<T>(a, shared, value, row, new_value);
  }
}

// The item's result where one CTA has all of it.
template <typename T, int kDim>
__device__ __forceinline__ void StoreWhole(const Arguments& a, Shared<kDim>& shared) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  if (shared.task.rows.newest >= 0) {
    ScoreNewRow<T>(a, shared);
    __syncthreads();
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < a.group * kColumns; i += kThreads) {
    StoreResult<T>(a, shared, i, CtaRow(shared, i / kColumns, i % kColumns),
                   NewValue<T, kDim>(a, shared.task, i));
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void DoTask(const Arguments& a, Shared<kDim>& shared) {
  AttendStrips<T, kDim>(a, shared);
  const CtaTask& task = shared.task;
  if (task.sharers.count > 1) {
    PostSplit(a, shared);
    if (task.merger >= 0) MergeSplits<T>(a, shared);
  } else {
    StoreWhole<T>(a, shared);
  }
  if (task.rows.newest >= 0 && task.begin == 0) StoreNewRow<T, kDim>(a, task);
}

// Into the L2, where a selection may ask for any part of it: a line a thread.
__device__ __forceinline__ void PrefetchPageTable(const Arguments& a) {
  constexpr int32_t kLineEntries = 128 / sizeof(uint64_t);
  const int64_t lines = int64_t{a.batch} * a.rows.layer.page_stride / kLineEntries;
  const int32_t cta = blockIdx.y * gridDim.x + blockIdx.x;
  const int64_t line = int64_t{cta} * kThreads + threadIdx.x;
  if (line >= lines) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(a.rows.layer.pages + line * kLineEntries));
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, Shape<kDim>::kCtasPerSm)
    AttendKernel(const __grid_constant__ Arguments a) {
  __shared__ Shared<kDim> shared;
  __shared__ int32_t kept_row;
  if (a.ahead) {
    LetNextStart();
  } else {  // not before the first rows are on their way: what the next kernel reads is behind them
    PrefetchPageTable(a);
    WaitForPrevious();
  }
  const bool keeps = KeepsQueries(a);
  if (keeps) AskForKeptRow(a, &kept_row);
  if (a.batch == 1) {
    OnlyTask(a.rows, a.group, a.by_heads, shared.task);
  } else {
    FirstTask<kThreads>(a.rows, a.batch * a.rows.layer.kv_heads, shared.task);
  }
  if (shared.task.sequence < 0) return;
  do {
    DoTask<T, kDim>(a, shared);
  } while (a.batch > 1 && NextTask(a.rows, shared.task));
  if (keeps) KeepQueries<T, kDim>(a, &kept_row);
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
         (w.kept.row == nullptr) == (w.kept.to == nullptr) &&
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

// Whether the heads' CTAs start one head after the other. What follows lists of pages is mostly
// the next layer's `score`, and of so few pages it reads nearly all index rows ahead, while the
// splits of this layer are merged: then what this layer lacks is what the step waits for. Measured
// (bench/notes/cuda.md): 4 to 6 % of a step of 64K and 128K tokens, and the other order 4 % from
// 256K on.
bool StartsByHeads(const AttendRawBatch& w) {
  constexpr int32_t kPages = 12 * 1024;
  return w.batch == 1 && w.selection.unit_tokens > 1 && w.layer.page_stride <= kPages;
}

// All CTAs that fit; of one sequence, as many for each KV head.
dim3 GridOf(const AttendRawBatch& w) {
  const int32_t ctas = ResidentCtas(w.layer.head_dim), heads = w.layer.kv_heads;
  if (w.batch > 1) return ctas;
  const int32_t each = ctas > heads ? ctas / heads : 1;
  return StartsByHeads(w) ? dim3(each, heads) : dim3(heads, each);
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
  a.by_heads = StartsByHeads(w);
  a.new_k = w.new_k;
  a.new_v = w.new_v;
  a.not_finite = w.not_finite;
  a.kept = w.kept;
  a.with = w.with;
  a.to = w.to;
  a.partial = w.partial;
  a.split_o = static_cast<uint4*>(w.workspace);
  a.split_ml = reinterpret_cast<uint2*>(a.split_o + SlotRows(w.group, w.layer.head_dim) *
                                                        (w.layer.head_dim / 4));
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
