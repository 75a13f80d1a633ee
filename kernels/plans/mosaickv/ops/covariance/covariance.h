// SPDX-License-Identifier: Apache-2.0
// Op covariance: out (+)= X^T X of the rows of one layer and KV head, uncentred
// (docs/spec/mosaickv.md 1).
//
// fp64 result [dim][dim], both triangles; tiles of at most 256 rows are summed in fp32 and added in
// fp64 (ref: all in fp64). Work items are independent. Cost: dim^2 / 2 multiply-adds a row.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

struct CovarianceWork {
  PagedRows rows;
  Run run;                // positions; may be empty
  double* out = nullptr;  // [dim][dim]
  bool accumulate = false;
};

void CovarianceRef(const CovarianceWork* work, int64_t n, Executor& executor);
void CovarianceSimd(const CovarianceWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
