// SPDX-License-Identifier: Apache-2.0
// Conversions of single elements on the device, with the bits of kernels/pages/dtype.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/pages/dtype.h"

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
template <>
__device__ inline float Rounded(float x) {
  return x;
}

// Elements i .. i + 7 of an array of `dtype`, in vectors. REQUIRES: the first is 16-byte aligned.
__device__ inline void LoadFloats(const void* array, DType dtype, int64_t i, float (&out)[8]) {
  if (dtype == DType::kF32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(array) + i);
    const float4 a = from[0], b = from[1];
    const float values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    for (int e = 0; e < 8; ++e) out[e] = values[e];
    return;
  }
  const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(array) + i);
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
  for (int e = 0; e < 8; ++e) {
    const auto bits = static_cast<uint16_t>(pairs[e / 2] >> (16 * (e % 2)));
    out[e] = dtype == DType::kF16 ? FloatOf(__ushort_as_half(bits))
                                  : FloatOf(__ushort_as_bfloat16(bits));
  }
}

}  // namespace kvstrata::cuda
