// SPDX-License-Identifier: Apache-2.0
// Op eigen: eigenvalues and eigenvectors of symmetric matrices [dim][dim], dim <= 256.
//
// Values descend; row i of `vectors` belongs to values[i], has norm 1, and its largest component by
// magnitude (of equal ones the first) is positive (docs/spec/mosaickv.md 1). Cyclic Jacobi in fp64
// for both backends: eigenvalues within 1e-12 of the largest, orthogonal within 1e-12 before the
// result is rounded to fp32. The diagonal breaks ties of equal eigenvalues by index.
// Work items are independent. Cost: about 10 dim^3 multiply-adds. Allocates dim^2 doubles an item.
#pragma once

#include "kernels/cpu/executor.h"

namespace kvstrata {

struct EigenWork {
  const double* a = nullptr;  // [dim][dim], symmetric; not changed
  int32_t dim = 0;
  double* values = nullptr;  // [dim]
  float* vectors = nullptr;  // [dim][dim]
};

void EigenRef(const EigenWork* work, int64_t n, Executor& executor);
void EigenSimd(const EigenWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
