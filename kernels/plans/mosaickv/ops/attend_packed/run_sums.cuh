// SPDX-License-Identifier: Apache-2.0
// What the warps of a CTA have summed over a run of segments: added up, rotated back, and added to
// the CTA's total. By all threads of a CTA.
#pragma once

#include "kernels/plans/mosaickv/ops/attend_packed/row_attention.cuh"

namespace kvstrata::cuda {

template <int kDim, int kChannels>
struct RunSums {
  static constexpr int kWarpsMax = PackedShape<kDim, kChannels>::kThreadsMax / 32;
  static constexpr int kColumns = kDim / 4;
  static constexpr int kSumStride = kChannels + 4;  // two lanes' sums lie in different banks

  float m[kWarpsMax][kPackedHeads], l[kWarpsMax][kPackedHeads];
  float total_m[kPackedHeads], total_l[kPackedHeads];  // over the runs done, in powers of two
  float before[kPackedHeads];                          // weight of the total before a run
  alignas(16) float total_o[kPackedHeads][kDim];

  // Floats of the scratch that Add wants.
  static int ScratchFloats(int threads, int group) {
    return group * std::max(threads / 32 * kSumStride, threads / kColumns * kDim);
  }
  // Barrier afterwards.
  __device__ __forceinline__ void Clear() {
    for (int i = threadIdx.x; i < kPackedHeads * kColumns; i += blockDim.x) {
      reinterpret_cast<float4*>(total_o)[i] = {0, 0, 0, 0};
    }
    if (threadIdx.x >= kPackedHeads) return;
    total_m[threadIdx.x] = -INFINITY;
    total_l[threadIdx.x] = 0;
  }
  // Adds the run whose values are rotated by the `stored` first rows of R at `r`. `scratch` may be
  // where tiles lie. Barrier afterwards.
  __device__ __forceinline__ void Add(RowAttention<kChannels>& attention, uint64_t r, int stored,
                                      int group, float* scratch, float (*sums)[kChannels]) {
    Rows rows;
    rows.Load(r, stored);  // is there when the sums are
    SumWarps(attention, group, scratch, sums);
    RotateBack(rows, r, stored, group, scratch, sums);
    __syncthreads();
    AddToTotal(group, scratch);
    __syncthreads();
  }

 private:
  // A thread's column of every parts()-th row of R, the first of which are asked for in advance.
  struct Rows {
    static constexpr int kParts = PackedShape<kDim, kChannels>::kThreadsMax / kColumns;
    static constexpr int kFirst = std::min(6, (kChannels + kParts - 1) / kParts);
    float4 x[kFirst];
    __device__ __forceinline__ void Load(uint64_t r, int stored) {
#pragma unroll
      for (int n = 0; n < kFirst; ++n) x[n] = At(r, min(RowOf(n), stored - 1));
    }
    static __device__ __forceinline__ int RowOf(int n) { return part() + n * parts(); }
    static __device__ __forceinline__ float4 At(uint64_t r, int row) {
      return reinterpret_cast<const float4*>(r)[row * kColumns + column()];
    }
  };
  static __device__ __forceinline__ int column() { return threadIdx.x % kColumns; }
  static __device__ __forceinline__ int part() { return threadIdx.x / kColumns; }
  static __device__ __forceinline__ int parts() { return static_cast<int>(blockDim.x) / kColumns; }

  // Warps' sums to `sums` [group][kChannels], and what they and the total so far weigh in the new
  // total. `scratch` [warps][group][kSumStride].
  __device__ __forceinline__ void SumWarps(RowAttention<kChannels>& attention, int group,
                                           float* scratch, float (*sums)[kChannels]) {
    auto& softmax = attention.softmax();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) {
      if (h >= group) break;
      const float sum = SumOfLanes(softmax.l[h]);
      if (lane != 0) continue;
      m[warp][h] = softmax.m[h];
      l[warp][h] = sum;
    }
    __syncthreads();  // tiles are used up too: the scratch is where they were
    for (int head = warp; head < group; head += warps) {
      const float own = lane < warps ? m[lane][head] : -INFINITY;
      const float top = fmaxf(total_m[head], MaxOfLanes(own));
      const float sum = SumOfLanes(lane < warps ? WeightOf(own, top) * l[lane][head] : 0);
      __syncwarp();  // all lanes have read the total before
      if (lane != 0) continue;
      before[head] = WeightOf(total_m[head], top);
      total_m[head] = top;
      total_l[head] = before[head] * total_l[head] + sum;
    }
    __syncthreads();
    float* const to = scratch + (warp * group + 2 * t) * kSumStride + g;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i >= group) break;
      const float weight = WeightOf(m[warp][2 * t + i], total_m[2 * t + i]);
#pragma unroll
      for (int j = 0; j < kChannels / 8; ++j) {
        to[i * kSumStride + 8 * j] = weight * softmax.o[j / 2][j % 2 * 2 + i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group * kChannels; i += blockDim.x) {
      const int head = i / kChannels, channel = i % kChannels;
      float sum = 0;
#pragma unroll 8
      for (int w = 0; w < warps; ++w) sum += scratch[(w * group + head) * kSumStride + channel];
      sums[head][channel] = sum;
    }
    __syncthreads();
  }

  // scratch [parts][group][kDim]: each part of the threads has the product of some rows of R and
  // the sums.
  __device__ __forceinline__ void RotateBack(const Rows& rows, uint64_t r, int stored, int group,
                                             float* scratch, const float (*sums)[kChannels]) const {
    float4 o[kPackedHeads] = {};
    const auto add = [&](const float4& x, int row) {
#pragma unroll
      for (int h = 0; h < kPackedHeads; ++h) {
        if (h >= group) break;
        const float s = sums[h][row];
        o[h] = {o[h].x + s * x.x, o[h].y + s * x.y, o[h].z + s * x.z, o[h].w + s * x.w};
      }
    };
#pragma unroll
    for (int n = 0; n < Rows::kFirst; ++n) {
      if (Rows::RowOf(n) < stored) add(rows.x[n], Rows::RowOf(n));
    }
#pragma unroll 4
    for (int n = Rows::kFirst; Rows::RowOf(n) < stored; ++n) {
      add(Rows::At(r, Rows::RowOf(n)), Rows::RowOf(n));
    }
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) {
      if (h >= group) break;
      reinterpret_cast<float4*>(scratch)[(part() * group + h) * kColumns + column()] = o[h];
    }
  }

  __device__ __forceinline__ void AddToTotal(int group, const float* scratch) {
    const int count = parts();
#pragma unroll 1
    for (int i = threadIdx.x; i < group * kColumns; i += blockDim.x) {
      auto& total = reinterpret_cast<float4*>(total_o)[i];
      const float weight = before[i / kColumns];
      float4 o = {weight * total.x, weight * total.y, weight * total.z, weight * total.w};
#pragma unroll 8
      for (int p = 0; p < count; ++p) {
        const float4 x = reinterpret_cast<const float4*>(scratch)[p * group * kColumns + i];
        o = {o.x + x.x, o.y + x.y, o.z + x.z, o.w + x.w};
      }
      total = o;
    }
  }
};

}  // namespace kvstrata::cuda
