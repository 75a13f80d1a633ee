// SPDX-License-Identifier: Apache-2.0
// The end of an attention op whose items (a sequence and a KV head) several CTAs share: each leaves
// what it attended in scratch, and the last one to arrive adds all of it, in the CTAs' order.
#pragma once

#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/ops/merge/merge_row.cuh"

namespace kvstrata::cuda {

struct SharedItem {
  int64_t rows;       // query rows of the batch
  int64_t first_row;  // the item's first
  int32_t group;
  int32_t cta, sharers;  // this CTA's number, of how many
  Partials splits;       // scratch [sharers][rows]
  uint32_t* counter;     // 0 before, and after
};

// What CTAs leave of four channels of a row, from thread to thread. kThreads * kSumBytes of shared
// memory.
inline constexpr int kSumBytes = sizeof(WeightedRow);

// Parts first, first + step, ... of `count`. All loads of kAtOnce of them are under way at once,
// whatever their number.
template <int kAtOnce>
__device__ __forceinline__ WeightedRow SumOfParts(const Partials& from, int64_t rows, int64_t row,
                                                  int dim, int c, int32_t first, int32_t step,
                                                  int32_t count) {
  WeightedRow sum;
#pragma unroll 1
  for (; first < count; first += kAtOnce * step) {
    float m[kAtOnce], l[kAtOnce];
    float4 o[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = min(first + i * step, count - 1) * rows + row;
      m[i] = first + i * step < count ? from.m[at] * kLog2E : -INFINITY;
      l[i] = from.l[at];
      o[i] = reinterpret_cast<const float4*>(from.o + at * dim)[c];
    }
    sum.Add(m, l, o);
  }
  return sum;
}

// attended(of_group, c): channels 4 c .. of a row over what this CTA attended. store(row, c, sum):
// the same over what all have. `sums` is in shared memory (kSumBytes), and what `attended` reads
// may lie there. By all threads; barrier before.
template <int kThreads, int kDim, int kAtOnce = 6, typename Attended, typename Store>
__device__ __forceinline__ void FinishItem(const SharedItem& item, Attended attended, Store store,
                                           WeightedRow* sums, bool& is_last) {
  constexpr int kColumns = kDim / 4;
  const int columns = item.group * kColumns, thread = static_cast<int>(threadIdx.x);
  if (item.sharers == 1) {
    for (int i = thread; i < columns; i += kThreads) {
      store(item.first_row + i / kColumns, i % kColumns, attended(i / kColumns, i % kColumns));
    }
    return;
  }
  for (int i = thread; i < columns; i += kThreads) {
    const int64_t at = item.cta * item.rows + item.first_row + i / kColumns;
    const WeightedRow x = attended(i / kColumns, i % kColumns);
    reinterpret_cast<float4*>(item.splits.o + at * kDim)[i % kColumns] = x.o;
    if (i % kColumns != 0) continue;
    item.splits.m[at] = x.m * kLn2;
    item.splits.l[at] = x.l;
  }
  if (!ArrivesLast(item.counter, item.sharers, is_last)) return;
  // Threads that have no column of their own take every so many of the parts of one.
  const int teams = max(kThreads / columns, 1), team = thread / columns;
  for (int i = thread - team * columns; team < teams && i < columns; i += kThreads) {
    const int64_t row = item.first_row + i / kColumns;
    const WeightedRow sum = SumOfParts<kAtOnce>(item.splits, item.rows, row, kDim, i % kColumns,
                                                team, teams, item.sharers);
    if (teams == 1) {
      store(row, i % kColumns, sum);
    } else {
      sums[thread] = sum;
    }
  }
  if (teams == 1) return;
  __syncthreads();
  if (thread >= columns) return;
  WeightedRow sum = sums[thread];
  for (int i = 1; i < teams; ++i) {
    const WeightedRow x = sums[i * columns + thread];
    sum.Add(x.m, x.l, x.o);
  }
  store(item.first_row + thread / kColumns, thread % kColumns, sum);
}

}  // namespace kvstrata::cuda
