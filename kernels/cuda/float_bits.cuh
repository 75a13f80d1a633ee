// Conversions of single elements on the device, with the bits of kernels/dtype.h.
#ifndef KVSTRATA_KERNELS_CUDA_FLOAT_BITS_CUH_
#define KVSTRATA_KERNELS_CUDA_FLOAT_BITS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/dtype.h"

namespace kvstrata::cuda {

__device__ inline float FloatOf(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float FloatOf(__half x) { return __half2float(x); }
__device__ inline float FloatOf(float x) { return x; }

template <typename T>
__device__ T Rounded(float x);
template <>
__device__ inline __nv_bfloat16 Rounded(float x) {
  // CUDA's own conversion makes another NaN than dtype.h.
  return isnan(x) ? __ushort_as_bfloat16(0x7FC0) : __float2bfloat16_rn(x);
}
template <>
__device__ inline __half Rounded(float x) {
  return __float2half_rn(x);
}

// Element i of an array of `dtype`.
__device__ inline float LoadFloat(const void* array, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF16:
      return FloatOf(static_cast<const __half*>(array)[i]);
    case DType::kBF16:
      return FloatOf(static_cast<const __nv_bfloat16*>(array)[i]);
    default:
      return static_cast<const float*>(array)[i];
  }
}

// 16 bytes that are read once: past L1.
__device__ inline uint4 LoadStreaming(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(address)));
  return v;
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_CUDA_FLOAT_BITS_CUH_
