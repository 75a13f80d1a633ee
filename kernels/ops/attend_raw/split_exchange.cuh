// SPDX-License-Identifier: Apache-2.0
// How the CTAs that share an item hand their splits to those that merge them: by the words
// themselves. A word of the workspace is 0 until a split's is there, and who has read it makes it 0
// again. So a split takes one write and one read through the L2; a counter behind a fence, and the
// splits read after it, take twice as long.
//
// A CTA that merges waits only for CTAs that do not wait (work_share.cuh) and that run with it or
// have run: a grid has no more CTAs than the GPU holds, and they start in order.
#pragma once

#include "kernels/ops/attend_raw/warp_attention.cuh"

namespace kvstrata::cuda {

// A float as a word that is not 0. (The NaN of all ones becomes another NaN.)
__device__ __forceinline__ uint32_t WordOf(float x) {
  const uint32_t word = ~__float_as_uint(x);
  return word == 0 ? 0x80000000u : word;
}
__device__ __forceinline__ float FloatOfWord(uint32_t word) { return __uint_as_float(~word); }

__device__ __forceinline__ void Post(uint4* to, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(WordOf(x.x)),
               "r"(WordOf(x.y)), "r"(WordOf(x.z)), "r"(WordOf(x.w))
               : "memory");
}
__device__ __forceinline__ void Post(uint2* to, float x, float y) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(WordOf(x)),
               "r"(WordOf(y))
               : "memory");
}

// Four channels of a split, as far as they are there.
struct Arriving {
  uint4 o = {0, 0, 0, 0};
  uint2 ml = {0, 0};

  __device__ __forceinline__ void Read(const uint4* from_o, const uint2* from_ml) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(o.x), "=r"(o.y), "=r"(o.z), "=r"(o.w)
                 : "l"(from_o)
                 : "memory");
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(ml.x), "=r"(ml.y)
                 : "l"(from_ml)
                 : "memory");
  }
  __device__ __forceinline__ bool IsThere() const {
    return o.x != 0 && o.y != 0 && o.z != 0 && o.w != 0 && ml.x != 0 && ml.y != 0;
  }
  __device__ __forceinline__ float m() const { return FloatOfWord(ml.x); }
  __device__ __forceinline__ void AddTo(WeightedRow& row) const {
    const float w = WeightOf(m(), row.m);
    row.l += w * FloatOfWord(ml.y);
    row.o.x += w * FloatOfWord(o.x);
    row.o.y += w * FloatOfWord(o.y);
    row.o.z += w * FloatOfWord(o.z);
    row.o.w += w * FloatOfWord(o.w);
  }
};

// Four channels of the CTA's own split.
template <int kDim>
__device__ __forceinline__ WeightedRow CtaRow(const Shared<kDim>& shared, int head, int column) {
  WeightedRow row;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) row.m = fmaxf(row.m, shared.m[w][head]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 o = reinterpret_cast<const float4*>(shared.warps[w].o[head])[column];
    const float weight = WeightOf(shared.m[w][head], row.m);
    row.l += weight * shared.l[w][head];
    row.o = {row.o.x + weight * o.x, row.o.y + weight * o.y, row.o.z + weight * o.z,
             row.o.w + weight * o.w};
  }
  return row;
}

// The CTA's split to those that merge, but what it merges itself.
template <int kDim>
__device__ __forceinline__ void PostSplit(const Arguments& a, const Shared<kDim>& shared) {
  constexpr int kColumns = Shape<kDim>::kColumns;
  const CtaTask& task = shared.task;
  const int32_t slot = task.sharers.Slot(task.cta - task.sharers.first);
#pragma unroll 1
  for (int i = threadIdx.x; i < a.group * kColumns; i += kThreads) {
    const int head = i / kColumns, column = i % kColumns;
    if (task.Merges(head)) continue;
    const WeightedRow row = CtaRow(shared, head, column);
    const int64_t at = int64_t{slot} * a.group + head;
    Post(&a.split_o[at * kColumns + column], row.o);
    if (column == 0) Post(&a.split_ml[at], row.m, row.l);
  }
}

// Adds four channels of a head of the other CTAs' splits part, part + parts, ... to `row`.
template <int kDim>
__device__ __forceinline__ void AwaitSplits(const Arguments& a, const CtaTask& task, int head,
                                            int column, int part, int parts, WeightedRow& row) {
  constexpr int kAtOnce = 8;
  const Sharers& sharers = task.sharers;
  const int own = task.cta - sharers.first;
  const auto at = [&](int split) { return int64_t{sharers.Slot(split)} * a.group + head; };
#pragma unroll 1
  for (int first = part; first < sharers.count; first += kAtOnce * parts) {
    Arriving splits[kAtOnce];
    const auto counts = [&](int j) {
      const int split = first + j * parts;
      return split < sharers.count && split != own;
    };
    for (bool waits = true; waits;) {  // for a kernel's other CTAs: no deadline
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (!counts(j) || splits[j].IsThere()) continue;
        const int64_t from = at(first + j * parts);
        splits[j].Read(&a.split_o[from * Shape<kDim>::kColumns + column], &a.split_ml[from]);
      }
      waits = false;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) waits |= counts(j) && !splits[j].IsThere();
    }
    float top = row.m;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (counts(j)) top = fmaxf(top, splits[j].m());
    }
    WeightedRow sum;
    sum.m = top;
    sum.Add(row.m, row.l, row.o);
    row = sum;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!counts(j)) continue;
      splits[j].AddTo(row);
      a.split_o[at(first + j * parts) * Shape<kDim>::kColumns + column] = {0, 0, 0, 0};
    }
  }
}

// Makes the sums of a head's other splits 0 again, by `threads` threads. Barrier before.
__device__ __forceinline__ void EmptySums(const Arguments& a, const CtaTask& task, int head,
                                          int thread, int threads) {
  const Sharers& sharers = task.sharers;
  const int own = task.cta - sharers.first;
#pragma unroll 1
  for (int split = thread; split < sharers.count; split += threads) {
    if (split != own) a.split_ml[int64_t{sharers.Slot(split)} * a.group + head] = {0, 0};
  }
}

}  // namespace kvstrata::cuda
