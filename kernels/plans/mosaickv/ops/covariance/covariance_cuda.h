// SPDX-License-Identifier: Apache-2.0
// Op covariance on the GPU (contract: covariance.h): X^T X of many heads' rows.
//
// Products are exact, sums of kCovarianceRows rows fp32 (in tensor cores, which truncate: within
// 1e-4 of sqrt(out[i][i] out[j][j])), sums of those fp64 and in order: the same inputs on the same
// GPU give the same bits. Cost: each row is read once; d = 128 is bound by memory.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/batches/head_rows.h"

namespace kvstrata::cuda {

inline constexpr int32_t kCovarianceRows = 8192;  // rows of a CTA, at most

struct CovarianceItem {
  HeadRows rows;  // may be empty
  uint64_t out;   // f64 [head_dim][head_dim], both triangles, 16-aligned
};

struct CovarianceBatch {
  HeadRowShape shape;
  const CovarianceItem* items = nullptr;  // device [count]
  int32_t count = 0;                      // up to 65535
  int32_t rows_max = 0;                   // at least the rows of any item
  bool accumulate = false;                // add to `out`
  uint32_t* counters = nullptr;           // device [count], 0 before the first call, after each
  float* workspace = nullptr;             // device, CovarianceWorkspaceBytes, any content
};

int64_t CovarianceWorkspaceBytes(const CovarianceBatch& work);

// One kernel. cudaErrorInvalidValue: a shape outside the ranges above. Calls that share counters or
// workspace must be ordered by a stream.
int CovarianceCuda(const CovarianceBatch& work, Stream stream);

}  // namespace kvstrata::cuda
