// SPDX-License-Identifier: Apache-2.0
// The tensor cores' 16x8x8 product, c += a b with fp32 sums, for fp16.
//
// Lane = 4 g + t holds of a [16 rows][8 k]: a0 row g, a1 row g + 8 (k = 2t, 2t+1); of b [8 k][8
// columns]: column g, the same k; of c what mma_m16n8k16.cuh says.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace kvstrata::cuda {

__device__ inline void MmaM16N8K8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

}  // namespace kvstrata::cuda
