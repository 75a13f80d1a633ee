// SPDX-License-Identifier: Apache-2.0
// A histogram of a list that the CTAs of a cluster count together, each a part in its own shared
// memory: where the need-th largest is found by reading all parts, once the cluster has met.
#pragma once

#include <cstdint>

#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/ops/pick/cluster_exchange.cuh"

namespace kvstrata::cuda {

__device__ inline void MeetCluster() {
  ArriveAtCluster();
  WaitForCluster();
}

// Every thread of every CTA calls every function. CTAs have at least kCount / 4 threads.
struct ClusterBins {
  static constexpr int kCount = 1024, kGroup = 32, kGroups = kCount / kGroup;
  alignas(16) int32_t bins[kCount];
  int32_t groups[kGroups];  // sums of bins, from the largest bins down
  int32_t of_all[kGroups];  // the same of the cluster
  int32_t total;            // total of the cluster
  Digit found;

  __device__ void Clear() {
    for (int i = threadIdx.x; i < kCount; i += blockDim.x) bins[i] = 0;
    __syncthreads();
  }
  __device__ void Count(int bin) { atomicAdd(&bins[bin], 1); }

  // What has been counted is what the others read. Returns the cluster's number of counts.
  __device__ int32_t Share() {
    __syncthreads();
    const int thread = threadIdx.x;
    if (thread < kCount / 4) {
      const int4 x = reinterpret_cast<const int4*>(bins)[kCount / 4 - 1 - thread];
      int32_t sum = x.x + x.y + x.z + x.w;
      for (int step = 1; step < kGroup / 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (thread % (kGroup / 4) == 0) groups[thread / (kGroup / 4)] = sum;
    }
    MeetCluster();
    if (thread < 32) {
      of_all[thread] = GroupOfAll(thread);
      const int32_t all = __reduce_add_sync(~0u, of_all[thread]);
      if (thread == 0) total = all;
    }
    __syncthreads();
    return total;
  }

  // The bin that the need-th largest is in. REQUIRES: Share; 1 <= need <= what it returned.
  __device__ Digit Find(int32_t need) {
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      const int32_t sum = of_all[lane], above = WarpInclusiveSum(sum) - sum;
      const int group = __ffs(__ballot_sync(~0u, above < need && need <= above + sum)) - 1;
      FindInGroup(group, __shfl_sync(~0u, above, group), need);
    }
    __syncthreads();
    return found;
  }

 private:
  __device__ int32_t GroupOfAll(int group) const {
    int32_t sum = 0;
#pragma unroll
    for (int j = 0; j < kClusterCtas; ++j) sum += LoadFromCta(&groups[group], j);
    return sum;
  }

  // Eight lanes read a group's bins of one CTA, four CTAs at a time.
  __device__ void FindInGroup(int group, int32_t above_group, int32_t need) {
    static_assert(kClusterCtas == 8 && kGroup == 32);
    const int lane = threadIdx.x, at = kCount / 4 - 1 - (kGroup / 4 * group + lane % 8);
    const auto* const own = reinterpret_cast<const int4*>(bins) + at;
    const int4 a = LoadFromCta(own, lane / 8), b = LoadFromCta(own, 4 + lane / 8);
    int32_t four[4] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
#pragma unroll
    for (int32_t& x : four) {
      x += __shfl_xor_sync(~0u, x, 8);
      x += __shfl_xor_sync(~0u, x, 16);
    }
    const int32_t sum = lane < 8 ? four[0] + four[1] + four[2] + four[3] : 0;
    const int32_t above = above_group + WarpInclusiveSum(sum) - sum;
    if (lane < 8) FindInBins({four[0], four[1], four[2], four[3]}, at, above, need, &found);
  }
};

}  // namespace kvstrata::cuda
