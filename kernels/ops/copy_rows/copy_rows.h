// SPDX-License-Identifier: Apache-2.0
// Op copy_rows: rows [rows][heads][dim] to another dtype or other strides, for tensors that the ops
// of a step do not take as they are. Rounds as dtype.h does.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

// Addresses and strides are multiples of the dtype's size.
struct CopyRowsBatch {
  const void* from = nullptr;                         // device
  int64_t from_row_stride = 0, from_head_stride = 0;  // bytes
  DType from_dtype = DType::kBF16;
  void* to = nullptr;  // device; overlaps nothing of `from`
  int64_t to_row_stride = 0, to_head_stride = 0;
  DType to_dtype = DType::kBF16;
  int32_t rows = 0, heads = 0, dim = 0;
};

// The truth; all of the batch's memory is the host's.
void CopyRowsRef(const CopyRowsBatch& work);

}  // namespace kvstrata::cuda
