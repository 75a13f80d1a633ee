// SPDX-License-Identifier: Apache-2.0
// Op pick_buckets: the tokens that a query attends under SentenceKV (docs/spec/sentencekv.md 5, 6),
// as kernels/plans/sentencekv/bucket.cc selects them.
//
// For each list (sequence b, KV head h): the mean of the sentence's queries, this step's included,
// over the head's group; its dot product with each bucket's mean key; buckets by descending score
// until `tau` tokens below recent_begin, the last one cut, its first tokens first. Equal scores
// keep the lower bucket, NaN ranks last. The tokens are listed in order.
//
// Queries: a table has two sums a row. This step's, its own query included, replaces the one that
// does not count; a sum counts in steps of more tokens than its own, if it was made behind
// queries_from. So a step that is given up leaves nothing: the next one has as many tokens.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/plans/sentencekv/ops/sentence_table.h"

namespace kvstrata::cuda {

struct PickBucketsBatch {
  const SentenceTable* tables = nullptr;  // device [batch]
  int32_t layer = 0;
  const int32_t* tokens = nullptr;  // device [batch], N
  // device [batch]: queries of steps of more tokens belong to the sentence; below 0: the sequence
  // has no buckets yet, nothing is picked and no query is kept.
  const int32_t* queries_from = nullptr;
  const int32_t* whole = nullptr;         // device [batch], whole buckets that there are
  const int32_t* recent_begin = nullptr;  // device [batch]; 0: attended in full, nothing is picked
  const void* q = nullptr;                // device [batch][kv_heads * group][head_dim]
  DType q_dtype = DType::kBF16;
  int32_t batch = 0, kv_heads = 0, group = 0;
  int32_t head_dim = 0;       // 64, 128 or 256
  int32_t tau = 0;            // tokens to pick
  int32_t* units = nullptr;   // device [batch][kv_heads][list_stride], written: tokens, ascending
  int32_t* counts = nullptr;  // device [batch][kv_heads], written
  int32_t list_stride = 0;    // at least tau
  uint32_t* counters =
      nullptr;  // device [batch * kv_heads], 0 before the first call and after each
};

// The truth, products in double; all of the batch's memory, tables included, is the host's. The
// first half keeps queries and scores buckets, the second lists tokens by the scores in the tables.
void ScoreBucketsRef(const PickBucketsBatch& work);
void TakeBucketsRef(const PickBucketsBatch& work);

}  // namespace kvstrata::cuda
