// SPDX-License-Identifier: Apache-2.0
// Which CTA is the last of several to finish its part of a piece of work.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

// True in all threads of the CTA that is the last of `count` to get here. The counter wraps to 0.
// `flag` is in shared memory. One thread's atomic, between barriers, orders what the whole CTA
// wrote before and reads after.
__device__ inline bool ArrivesLast(uint32_t* counter, int32_t count, bool& flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(count - 1)
                 : "memory");
    flag = before == static_cast<uint32_t>(count - 1);
  }
  __syncthreads();
  return flag;
}

}  // namespace kvstrata::cuda
