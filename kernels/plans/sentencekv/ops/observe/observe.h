// SPDX-License-Identifier: Apache-2.0
// Op observe: keeps the last queries of a prompt (docs/spec/sentencekv.md 2), as ObservedQueries
// (kernels/plans/sentencekv/importance.h) does: of each sequence's new tokens the last `capacity`,
// as fp32, the query of position t at t % capacity.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/plans/sentencekv/ops/sentence_table.h"

namespace kvstrata::cuda {

struct ObserveBatch {
  const SentenceTable* tables = nullptr;  // device [batch]: `observed` is written
  int32_t layer = 0;
  int32_t capacity = 0;              // n_obs
  const int32_t* visible = nullptr;  // device [batch][new_tokens], position + 1
  const void* q = nullptr;           // device [batch][new_tokens][query_floats], 16-byte aligned
  DType q_dtype = DType::kBF16;
  int32_t batch = 0, new_tokens = 0;
  int32_t query_floats = 0;  // query_heads * head_dim, a multiple of 8
};

// The truth; all of the batch's memory, tables included, is the host's.
void ObserveRef(const ObserveBatch& work);

}  // namespace kvstrata::cuda
