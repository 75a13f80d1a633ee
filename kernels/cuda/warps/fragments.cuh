// SPDX-License-Identifier: Apache-2.0
// What goes into and comes out of the tensor cores' fragments (mma_m16n8k16.cuh): 16-byte loads
// that pass the L1 by, pairs of 16-bit elements, transposes.
//
// Lanes of a warp are (g, t) = (lane / 4, lane % 4) throughout, as the PTX manual draws fragments
// of m16n8k16: A rows g and g + 8, B and C columns g and {2t, 2t + 1}. sm_80 and later.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvstrata::cuda {

inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// 16 bytes that this kernel reads once, of rows of at least 256 bytes, which the L2 fetches whole
// (1 % faster at 1M tokens), or of smaller ones. Volatile: loads are issued in the order written.
__device__ __forceinline__ uint4 LoadOnce256(uint64_t address) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}
__device__ __forceinline__ uint4 LoadOnce128(uint64_t address) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

template <typename T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  // {low, high} in one register.
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
  }
};

template <>
struct Element<__half> {
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
  }
};

// Transposes an 8x8 matrix of 16-bit elements: lane (g, t) gives row g, columns {2t, 2t + 1}, and
// gets the same of the transpose.
__device__ __forceinline__ uint32_t Transpose8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The low (high) halves of two registers in one.
__device__ __forceinline__ uint32_t LowHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t HighHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

}  // namespace kvstrata::cuda
