// SPDX-License-Identifier: Apache-2.0
// Powers of two, for softmax.
#pragma once

namespace kvstrata::cuda {

// 2^x in one instruction; 2^-inf = 0, and so is what would be denormal.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace kvstrata::cuda
