// SPDX-License-Identifier: Apache-2.0
// What selector bucket (SentenceKV) keeps of one sequence in a GPU's memory: where its arrays lie.
// Steps (kernels/plans/sentencekv/gpu/cuda_bucket.cc) allocate them and pass tables on; ops fill
// and read them. A POD of device addresses; no CUDA header.
//
// A row is a (layer, KV head): layer * kv_heads + head. Two kinds of buckets, numbered one after
// the other, both in order of position:
//   of the prompt: the kept tokens of a sentence; bucket i of a row has kept[firsts[i]] ..
//                  kept[firsts[i + 1] - 1]
//   whole: sentences all of whose tokens are kept (generated ones; all of a short prompt's), the
//                  same in all rows: [whole[2 i], whole[2 i + 1])
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/candidates.h"
#include "kernels/pages/dtype.h"

namespace kvstrata::cuda {

// What op pick_buckets knows of a bucket: its score, the tokens that it supplies, and where they
// begin: an entry of `kept`, or the first token of a whole one.
struct alignas(16) BucketScore {
  float score = 0;
  int32_t size = 0, first = 0, unused = 0;
};

struct SentenceTable {
  float* observed = nullptr;    // [layers][n_obs][query_heads][head_dim], position t at t % n_obs
  float* queries = nullptr;     // [rows][2 sums], QuerySumFloats each: op pick_buckets
  int32_t* kept = nullptr;      // [rows][kept_stride], ascending
  int32_t* firsts = nullptr;    // [rows][bucket_stride + 1]
  int32_t* counts = nullptr;    // [rows], buckets of the prompt
  BF16* means = nullptr;        // [rows][bucket_stride][head_dim]
  int32_t* whole = nullptr;     // [whole_stride][2]
  BF16* whole_means = nullptr;  // [whole_stride][rows][head_dim]
  BucketScore* scores =
      nullptr;  // [kv_heads][bucket_stride + whole_stride], of the layer under way
  int32_t kept_stride = 0, bucket_stride = 0, whole_stride = 0;
  int32_t rows = 0;  // layers * kv_heads

  KVS_HOST_DEVICE int32_t score_stride() const { return bucket_stride + whole_stride; }
};

// A sum of queries: { int32_t tokens (of the step that made it, 0: none); int32_t count; float
// sum[head_dim] at 4 }.
KVS_HOST_DEVICE inline int64_t QuerySumFloats(int32_t head_dim) { return int64_t{head_dim} + 4; }

}  // namespace kvstrata::cuda
