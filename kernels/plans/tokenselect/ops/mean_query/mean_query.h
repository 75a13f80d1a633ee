// SPDX-License-Identifier: Apache-2.0
// Op mean_query: the mean of a prompt chunk's queries, which stands for the chunk where a selector
// selects in prefill (docs/spec/tokenselect.md 4). Sums in double.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

struct MeanQueryBatch {
  const void* q = nullptr;  // device [rows][row_floats]
  DType q_dtype = DType::kBF16;
  int32_t rows = 0;
  int32_t row_floats = 0;  // query_heads * head_dim, a multiple of 32
  float* mean = nullptr;   // device [row_floats], written
};

// The truth; all of the batch's memory is the host's.
void MeanQueryRef(const MeanQueryBatch& work);

}  // namespace kvstrata::cuda
