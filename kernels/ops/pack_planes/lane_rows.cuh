// SPDX-License-Identifier: Apache-2.0
// Rows of four tokens in the registers of a warp: lane 8 i + s has token i, channels kLane s .. of
// it. So a lane's channels have the same places in words of 2 and of 4 bits.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/pages/quantised_group.h"

namespace kvstrata::cuda {

template <int kDim>
struct LaneShape {
  static constexpr int kLane = kDim / 8;    // channels
  static constexpr int kFours = kLane / 4;  // their codes, four in a register
};

// NaN is 0; infinities and what no fp16 holds are the largest.
__device__ __forceinline__ float Counted(float x) {
  return isnan(x) ? 0.0f : fminf(fmaxf(x, -kQuantisedMax), kQuantisedMax);
}

// The rotation of docs/spec/planes.md 3 over the eight lanes of a token.
template <int kDim>
__device__ __forceinline__ void Rotate(float (&x)[LaneShape<kDim>::kLane]) {
  constexpr int kLane = LaneShape<kDim>::kLane;
  constexpr float kSize = kDim == 64 ? 0.125f : kDim == 256 ? 0.0625f : 0.08838834764831845;
#pragma unroll
  for (int stride = 1; stride < kLane; stride *= 2) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
      if ((c & stride) != 0) continue;
      const float a = x[c], b = x[c + stride];
      x[c] = __fadd_rn(a, b);
      x[c + stride] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    const float sign = (threadIdx.x & step) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
      x[c] = fmaf(x[c], sign, __shfl_xor_sync(~0u, x[c], step));
    }
  }
#pragma unroll
  for (int c = 0; c < kLane; ++c) x[c] = __fmul_rn(x[c], kSize);
}

}  // namespace kvstrata::cuda
