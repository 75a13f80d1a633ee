// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that a thread waits for later (cp.async), 16 bytes each.
//
// A thread commits what it started as a group; groups complete in order. What other lanes copied
// can be read after the wait and a __syncwarp. `from` is a global address; the L1 is passed by.
// sm_80 and later.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

// For copies of what is read once: the L2 drops it before what else is in it.
__device__ __forceinline__ uint64_t ReadOncePolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// For long runs of bytes: the L2 fetches 256 at a time.
__device__ __forceinline__ void CopyOfRun(void* to, uint64_t from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "l"(policy)
               : "memory");
}
// The sector of 32 bytes alone.
__device__ __forceinline__ void CopyOfSector(void* to, uint64_t from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kvstrata::cuda
