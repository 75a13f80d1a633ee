// SPDX-License-Identifier: Apache-2.0
// Asks the L2 for bytes that a later copy reads (cp.async.bulk.prefetch). sm_90.
#ifndef KVSTRATA_KERNELS_CUDA_WARPS_L2_PREFETCH_CUH_
#define KVSTRATA_KERNELS_CUDA_WARPS_L2_PREFETCH_CUH_

#include <cstdint>

namespace kvstrata::cuda {

// Of one thread. from: a global address; both are multiples of 16.
__device__ __forceinline__ void PrefetchToL2(uint64_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_CUDA_WARPS_L2_PREFETCH_CUH_
