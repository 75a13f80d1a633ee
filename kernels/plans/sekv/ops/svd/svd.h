// SPDX-License-Identifier: Apache-2.0
// Op svd: the leading `rank` singular triplets of X [n][dim], batched (docs/spec/sekv.md 4).
//
// x ~ u diag(s) vt; s descends. ref: exact (one-sided Jacobi or the eigenvectors of the smaller
// Gram matrix in fp64). simd: exact the same way while min(n, dim) <= 64, else randomized (Halko et
// al.: a Gaussian sketch of rank + 8 columns with a fixed seed, two power iterations, fp32 with
// fp64 orthonormalisation). Signs of the triplets are free. s[i] of a rank-deficient X is 0, and
// then u's column and vt's row are 0. Work items are independent. Allocates scratch of the size of
// its inputs.
#pragma once

#include "kernels/cpu/executor.h"

namespace kvstrata {

struct SvdWork {
  const float* x = nullptr;  // [n][dim]
  int32_t n = 0, dim = 0;
  int32_t rank = 0;     // <= min(n, dim)
  float* u = nullptr;   // [n][rank]
  float* s = nullptr;   // [rank]
  float* vt = nullptr;  // [rank][dim]
};

void SvdRef(const SvdWork* work, int64_t n, Executor& executor);
void SvdSimd(const SvdWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
