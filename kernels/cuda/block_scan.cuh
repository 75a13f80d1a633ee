// Sums over the lanes of a warp and the threads of a CTA, in a fixed order.
#ifndef KVSTRATA_KERNELS_CUDA_BLOCK_SCAN_CUH_
#define KVSTRATA_KERNELS_CUDA_BLOCK_SCAN_CUH_

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

// The sum over the threads before this one; `total`, unless null, gets that of all of them.
// warp_sums: shared [kWarps], free before and after. Two barriers.
template <int kWarps>
__device__ inline int32_t BlockExclusiveSum(int32_t x, int32_t* warp_sums,
                                            int32_t* total = nullptr) {
  const int warp = threadIdx.x / 32;
  const int32_t inclusive = WarpInclusiveSum(x);
  if (threadIdx.x % 32 == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int32_t before = 0, all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int32_t sum = warp_sums[i];
    if (i < warp) before += sum;
    all += sum;
  }
  __syncthreads();
  if (total != nullptr) *total = all;
  return before + inclusive - x;
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_CUDA_BLOCK_SCAN_CUH_
