// SPDX-License-Identifier: Apache-2.0
// Op score on the GPU: queries against the summary rows of the candidate units (score.h).
//
//   scores[b][h][u - first] = max over the queries of KV head h of
//       fields 1 (kDot)     q . row[u]
//       fields 2 (kMinMax)  sum_c max(q_c * min_c[u], q_c * max_c[u])
//       the same with `deviation` (kDeviation)  q . mean[u] + 2 sqrt(sum_c q_c^2 variance_c[u])
// for the candidates [first, last) of sequence b (kernels/cuda/batches/candidates.h). Sequences
// that are attended in full are not scored. The sum of the heads' softmax over units is op vote
// (vote_cuda.h) with `rule` of units and one output per KV head.
//
// Rows bf16 or fp16, head_dim 64, 128 or 256, 1 to 8 queries a KV head. Sums in fp32: relative
// error <= 5e-3 of `ref`; over fp16 rows a q_c^2 above 65504 counts as 65504. Queries and rows must
// be finite. Cost: reads each row once; one kernel.
#pragma once

#include "kernels/cuda/batches/candidates.h"
#include "kernels/cuda/batches/device_rows.h"

namespace kvstrata::cuda {

struct ScoreBatch {
  DeviceRows rows;           // field 0: the means, or the minima
  int32_t fields = 1;        // 2: maxima, or variances, lie `field_stride` bytes after field 0
  bool deviation = false;    // fields 2 are means and variances
  int64_t field_stride = 0;  // bytes, a multiple of 16
  CandidateRule rule;
  const int32_t* tokens = nullptr;  // device [batch]
  const void* q = nullptr;          // device [batch][query_heads][head_dim], 16-byte aligned
  DType q_dtype = DType::kBF16;
  int64_t q_stride = 0;  // elements from a sequence to the next, 0: query_heads * head_dim
  int32_t batch = 0, query_heads = 0;
  float* scores = nullptr;  // device [batch][kv_heads][unit_stride]
  int32_t unit_stride = 0;  // candidates a sequence may have
  bool ahead = false;       // launch.cuh; of rows and tokens, not of q

  // Elements from q to the queries of a sequence.
  KVS_HOST_DEVICE constexpr int64_t QueriesAt(int64_t sequence) const {
    return sequence * (q_stride != 0 ? q_stride : int64_t{query_heads} * rows.head_dim);
  }
};

// cudaErrorInvalidValue for a shape that it does not take.
int ScoreCuda(const ScoreBatch& work, Stream stream);

}  // namespace kvstrata::cuda
