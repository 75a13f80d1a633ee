// SPDX-License-Identifier: Apache-2.0
// How the CTAs of a list tell each other what they have, as one cluster, through its distributed
// shared memory. Compute capability 9.0. REQUIRES: grid (kClusterCtas, lists), a cluster a list.
//
// A histogram is summed where its digit is: each CTA reads the sums of groups of bins of all CTAs,
// then the bins of the group that holds the digit, 3 KB in two dependent loads behind one barrier.
// All bins would be 57 KB, thousands of clocks; each CTA a share of the bins, told to all, 14 KB
// and a second barrier.
#pragma once

#include <cstdint>

#include "kernels/ops/pick/picker_memory.cuh"

namespace kvstrata::cuda {

// What lies at `here` of this CTA's shared memory, in that of another. Volatile: computed where it
// is needed, not kept in registers through the passes.
__device__ inline uint32_t InCta(const void* here, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(here))), "r"(rank));
  return there;
}
__device__ inline int32_t LoadFromCta(const int32_t* here, int rank) {
  int32_t x;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(x) : "r"(InCta(here, rank)) : "memory");
  return x;
}
__device__ inline int2 LoadFromCta(const int2* here, int rank) {
  int2 x;
  asm volatile("ld.shared::cluster.v2.s32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "r"(InCta(here, rank))
               : "memory");
  return x;
}
__device__ inline int4 LoadFromCta(const int4* here, int rank) {
  int4 x;
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(InCta(here, rank))
               : "memory");
  return x;
}

// A barrier's release is of what lies in this CTA's shared memory: that of all memory would wait
// for writes to global memory too.
__device__ inline void ArriveAtCluster() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#else
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ inline void WaitForCluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Every thread of every CTA calls every function, as those of GlobalExchange. What a CTA reads of
// another is written before a barrier of the cluster and then left alone.
class ClusterExchange {
 public:
  static constexpr int kCtasMax = kClusterCtas;
  // Half of the room for them: the other half has this CTA's. More would take longer to read than
  // another pass.
  static constexpr int kCandidates = kPickCandidates / 2;

  __device__ explicit ClusterExchange(PickerMemory& s) : s_(s), cta_(blockIdx.x) {}

  __device__ static constexpr int ctas() { return kClusterCtas; }
  __device__ int cta() const { return cta_; }

  __device__ Digit FindDigit(int pass, int32_t need) {
    if (threadIdx.x < kScanThreads) {
      const int at = kScanThreads - 1 - static_cast<int>(threadIdx.x);
      const int4 bins = reinterpret_cast<const int4*>(s_.histogram[pass])[at];
      const int32_t sum = bins.x + bins.y + bins.z + bins.w, lane = threadIdx.x % 32;
      const int32_t both = __reduce_add_sync(~0u, sum);
      const int32_t first = __reduce_add_sync(~0u, lane < 16 ? sum : 0);
      if (lane == 0) {
        *reinterpret_cast<int2*>(&s_.group_sums[pass][threadIdx.x / 16]) = {first, both - first};
      }
    }
    Wait();
    if (threadIdx.x < 32) FindInCtas(pass, need);
    __syncthreads();
    return s_.found[pass];
  }

  __device__ uint32_t* Segment() const { return s_.candidates + kCandidates; }

  __device__ void Tell(int2 counts) {
    if (threadIdx.x == 0) s_.counts_of_cta = counts;
  }

  __device__ void Wait() {
    ArriveAtCluster();
    WaitForCluster();
  }

  __device__ int2 CountsOf(int cta) const { return LoadFromCta(&s_.counts_of_cta, cta); }
  __device__ uint32_t Candidate(int cta, int i) const {
    return LoadFromCta(reinterpret_cast<const int32_t*>(Segment()) + i, cta);
  }

  // All it has read has been used: nothing is to be ordered, only the others' end put off.
  __device__ void DoneReading(int) { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
  __device__ void WaitForReaders() { WaitForCluster(); }

 private:
  // One warp: the group of bins that holds the digit, then the digit.
  __device__ void FindInCtas(int pass, int32_t need) {
    static_assert(kGroups == 32 && kClusterCtas == 8);
    const int lane = threadIdx.x % 32, half = lane / 16;
    int32_t sum = 0;
#pragma unroll
    for (int j = 0; j < kClusterCtas; ++j) sum += LoadFromCta(&s_.group_sums[pass][lane], j);
    const int32_t above = WarpInclusiveSum(sum) - sum;
    const int group = __ffs(__ballot_sync(~0u, above < need && need <= above + sum)) - 1;
    const int32_t above_group = __shfl_sync(~0u, above, group);

    // A half of the warp for a half of the CTAs.
    const int at = kScanThreads - 1 - (16 * group + lane % 16);
    int4 bins = {};
#pragma unroll
    for (int j = 0; j < kClusterCtas / 2; ++j) {
      const int4 x = LoadFromCta(reinterpret_cast<const int4*>(s_.histogram[pass]) + at,
                                 kClusterCtas / 2 * half + j);
      bins = {bins.x + x.x, bins.y + x.y, bins.z + x.z, bins.w + x.w};
    }
    bins = {bins.x + __shfl_xor_sync(~0u, bins.x, 16), bins.y + __shfl_xor_sync(~0u, bins.y, 16),
            bins.z + __shfl_xor_sync(~0u, bins.z, 16), bins.w + __shfl_xor_sync(~0u, bins.w, 16)};
    const int32_t four = half == 0 ? bins.x + bins.y + bins.z + bins.w : 0;
    const int32_t before = WarpInclusiveSum(four) - four;
    if (half == 0) FindInBins(bins, at, above_group + before, need, &s_.found[pass]);
  }

  PickerMemory& s_;
  const int cta_;
};

}  // namespace kvstrata::cuda
