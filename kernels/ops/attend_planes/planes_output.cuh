// SPDX-License-Identifier: Apache-2.0
// The end of the op: what the CTAs of an item have attended, added up by the last of them, rotated
// back and stored.
#pragma once

#include "kernels/ops/attend_planes/planes_ctas.cuh"
#include "kernels/ops/merge/shared_item.cuh"

namespace kvstrata::cuda {

// Rotates a row back, of which a lane has kEach neighbouring channels. By a warp.
template <int kEach>
__device__ __forceinline__ void RotateBack(float (&x)[kEach]) {
#pragma unroll
  for (int stride = 1; stride < kEach; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const bool is_second = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], step);
      x[i] = is_second ? other - x[i] : x[i] + other;
    }
  }
}

// A head's sums in shared memory to the output. By a warp.
template <int kDim>
__device__ __forceinline__ void StoreHead(const PlanesArguments& a, int64_t row, float m, float l,
                                          float (&o)[kDim]) {
  const AttendPlanesBatch& w = a.work;
  constexpr int kEach = kDim / 32;
  float* const own = o + threadIdx.x % 32 * kEach;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = own[i];
  RotateBack(x);
  const float size = rsqrtf(static_cast<float>(kDim));
#pragma unroll
  for (int i = 0; i < kEach; ++i) own[i] = x[i] * size;
  __syncwarp();
  for (int column = threadIdx.x % 32; column < kDim / 4; column += 32) {
    StoreResult(w.with, w.to, w.partial, a.rows(), row, kDim, column,
                {m, l, reinterpret_cast<const float4*>(o)[column]});
  }
}

// An item has 33 parts where a GPU has 132 SMs, 8 items and two CTAs each.
inline constexpr int kPartsAtOnce = 17;

// The item's sums, of all its CTAs in the last of them, to the output.
template <int kDim, int kHeads, typename Warp, typename Shape>
__device__ __forceinline__ void Finish(const PlanesArguments& a, const CtaPlace& place,
                                       CtaMemory<kDim, kHeads, Warp, Shape>& shared) {
  const AttendPlanesBatch& w = a.work;
  const SharedItem item{w.group,
                        int64_t{place.share.first} * w.group,
                        w.group,
                        place.share.cta,
                        place.share.ctas,
                        a.splits,
                        w.counters + place.item};
  if (threadIdx.x == 0) shared.is_last = place.share.ctas == 1;
  __syncthreads();
  FinishItem<Shape::kThreads, kDim, kPartsAtOnce>(
      item,
      [&](int head, int column) {
        float m[Shape::kWarps], l[Shape::kWarps];
        float4 o[Shape::kWarps];
#pragma unroll
        for (int warp = 0; warp < Shape::kWarps; ++warp) {
          const auto& of_warp = shared.warps[warp];
          m[warp] = of_warp.m[head];
          l[warp] = of_warp.l[head];
          o[warp] = reinterpret_cast<const float4*>(of_warp.o[head])[column];
        }
        WeightedRow sum;
        sum.Add(m, l, o);
        return sum;
      },
      [&](int64_t row, int column, const WeightedRow& sum) {
        const auto head = static_cast<int>(row - item.first_row);
        reinterpret_cast<float4*>(shared.o[head])[column] = sum.o;
        if (column != 0) return;
        shared.m[head] = sum.m;
        shared.l[head] = sum.l;
      },
      reinterpret_cast<WeightedRow*>(shared.warps), shared.is_last);
  if (!shared.is_last) return;
  __syncthreads();
  for (int head = threadIdx.x / 32; head < w.group; head += Shape::kWarps) {
    StoreHead<kDim>(a, place.first_row + head, shared.m[head], shared.l[head], shared.o[head]);
  }
}

}  // namespace kvstrata::cuda
