// SPDX-License-Identifier: Apache-2.0
// What attention ops on a GPU hand each other: partials, which op merge (merge.h) takes on a CPU,
// and the output, to which the last of a layer's ops merges what those before it left.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

// Partials as merge.h defines them, `parts` of each query row. A part without rows: m -inf, l 0.
struct Partials {
  float* m = nullptr;  // device [parts][batch][query_heads], natural logarithms
  float* l = nullptr;  // device [parts][batch][query_heads]
  float* o = nullptr;  // device [parts][batch][query_heads][head_dim], 16-byte aligned
  int32_t parts = 0;
};

// Where outputs go.
struct AttentionOutput {
  void* rows = nullptr;  // device [batch][query_heads][head_dim], 16-byte aligned
  DType dtype = DType::kBF16;
  float* lse = nullptr;  // device [batch][query_heads], natural; null: not wanted
};

}  // namespace kvstrata::cuda
