// SPDX-License-Identifier: Apache-2.0
// The tensor cores' 16x8x16 product, c += a b with fp32 sums, for bf16 and fp16.
//
// Lane = 4 g + t holds of a [16 rows][16 k]: a0 row g, a1 row g + 8 (k = 2t, 2t+1); a2, a3 the same
// rows (k = 2t+8, 2t+9); of b [16 k][8 columns]: column g, b0 k = 2t, 2t+1 and b1 k = 2t+8, 2t+9;
// of c [16][8]: c0, c1 row g, columns 2t, 2t+1; c2, c3 row g + 8. The order of k is free as long as
// a and b agree.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvstrata::cuda {

template <typename T>
__device__ void MmaM16N8K16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                            uint32_t b0, uint32_t b1);

template <>
__device__ inline void MmaM16N8K16<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ inline void MmaM16N8K16<__half>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace kvstrata::cuda
