// SPDX-License-Identifier: Apache-2.0
// What keeps a row's queries (KeptQueries): the first warp of the first CTA. Which row it is lies
// in memory, since a captured graph serves many steps, and in nearly all of them it is none; so it
// is asked for where the kernel begins, and is there where it ends.
#pragma once

#include "kernels/ops/attend_raw/warp_attention.cuh"

namespace kvstrata::cuda {

__device__ __forceinline__ bool KeepsQueries(const Arguments& a) {
  return a.kept.row != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 32;
}

// Each lane asks, and waits for its own: no barrier is needed.
__device__ __forceinline__ void AskForKeptRow(const Arguments& a, int32_t* shared) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(a.kept.row)
               : "memory");
}

// REQUIRES: the kernels before are complete, AskForKeptRow by the same lanes.
template <typename T, int kDim>
__device__ __forceinline__ void KeepQueries(const Arguments& a, const int32_t* shared) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  const int32_t row = *static_cast<const volatile int32_t*>(shared);
  if (row < 0 || row >= a.batch) return;
  constexpr int kPieces = kDim * int{sizeof(T)} / 16;
  const auto* const from = reinterpret_cast<const uint4*>(a.q + row * a.q_stride);
  for (int i = threadIdx.x; i < a.rows.layer.kv_heads * a.group * kPieces; i += 32) {
    static_cast<uint4*>(a.kept.to)[i] = from[i];
  }
}

}  // namespace kvstrata::cuda
