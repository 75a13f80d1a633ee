// SPDX-License-Identifier: Apache-2.0
// Op importance: what a prompt's last queries pay to each token (op vote, a query an item) summed
// over the queries, and the maximum over a window of tokens (docs/spec/sentencekv.md 2).
//
// Items may come in several calls, in order: sums are kept in fp32 between them.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

struct ImportanceBatch {
  const float* votes = nullptr;  // device [items][kv_heads][stride]
  int32_t items = 0, kv_heads = 0, stride = 0;
  int32_t tokens = 0;                // tokens of a list that get an importance
  bool first = false, last = false;  // items of the prompt
  int32_t pool = 1;                  // width: token t gets the maximum of [t - (pool - 1) / 2, t +
                                     // pool / 2], cut at the ends
  float* sums = nullptr;             // device [kv_heads][stride]
  float* importance = nullptr;  // device [kv_heads][stride], written with the last items: token
                                // begin's first
  int32_t begin = 0;
};

// The truth, each call's sums in double; all of the batch's memory is the host's.
void ImportanceRef(const ImportanceBatch& work);

}  // namespace kvstrata::cuda
