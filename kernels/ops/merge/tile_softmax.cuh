// SPDX-License-Identifier: Apache-2.0
// The softmax of one warp over tiles of 16 rows, for up to 8 query heads, in tensor-core fragments
// (fragments.cuh), and the sums of weighted rows that go with it. For all attention ops.
//
// Scores of a tile: s[0..3] of rows g (s[0], s[1]) and g + 8, heads 2t and 2t + 1. Sums: o[i] is
// the accumulator of product i, 16 channels by 8 heads, whichever channels the op puts there.
#pragma once

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/ops/merge/merge_row.cuh"

namespace kvstrata::cuda {

template <int kProducts>
struct TileSoftmax {
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};  // heads 2t, 2t + 1; m in powers of two
  float o[kProducts][4] = {};

  // Scores to weights in T: p0, p1 are rows {2t, 2t + 1} and {2t + 8, 2t + 9} of head g. `scale`
  // has log2(e) in it; rows whose bit in `present` is 0 weigh nothing.
  template <typename T>
  __device__ __forceinline__ void Weigh(uint32_t present, float scale, float (&s)[4], uint32_t& p0,
                                        uint32_t& p1) {
    const int g = threadIdx.x % 32 / 4;
    const bool low = present >> g & 1, high = present >> (g + 8) & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[i] = low ? s[i] * scale : -INFINITY;
      s[2 + i] = high ? s[2 + i] * scale : -INFINITY;
    }
    const bool higher = fmaxf(s[0], s[2]) > m[0] || fmaxf(s[1], s[3]) > m[1];
    if (__any_sync(kAllLanes, higher)) RaiseMaxima(s);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2f(s[i] - m[i & 1]);
    l[0] += s[0] + s[2];
    l[1] += s[1] + s[3];
    p0 = Transpose8x8(Element<T>::Pack(s[0], s[1]));
    p1 = Transpose8x8(Element<T>::Pack(s[2], s[3]));
  }

  // Sums l over lanes. Afterwards every lane has those of heads 2t and 2t + 1.
  __device__ __forceinline__ void SumWeights() {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      l[0] += __shfl_xor_sync(kAllLanes, l[0], step);
      l[1] += __shfl_xor_sync(kAllLanes, l[1], step);
    }
  }

 private:
  __device__ __forceinline__ void RaiseMaxima(const float (&s)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = fmaxf(m[i], fmaxf(s[i], s[2 + i]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
      }
      const float weight = WeightOf(m[i], top);
      m[i] = top;
      l[i] *= weight;
#pragma unroll
      for (int j = 0; j < kProducts; ++j) {
        o[j][i] *= weight;
        o[j][2 + i] *= weight;
      }
    }
  }
};

}  // namespace kvstrata::cuda
