// SPDX-License-Identifier: Apache-2.0
// Sums over the lanes of a warp.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

// The sum over this lane and those before it.
__device__ inline int32_t WarpInclusiveSum(int32_t x) {
  for (int step = 1; step < 32; step *= 2) {
    const int32_t before = __shfl_up_sync(~0u, x, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) x += before;
  }
  return x;
}

}  // namespace kvstrata::cuda
