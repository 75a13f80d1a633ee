// SPDX-License-Identifier: Apache-2.0
// Op score_bits on the GPU: logits of the candidates in sealed groups (score_bits.h). No step asks
// for it: selector bits takes op vote over groups, which scores in its first kernel.
//
//   logits[b][h][t - first] = scale * sum over c of q_h[c] (minimum[c] + step[c] code_t[c])
// for the tokens t of the candidates [first, last) of sequence b
// (kernels/cuda/batches/candidates.h) that are in groups which were complete before the step: t <
// (tokens[b] - 1) rounded down to groups. Others are not written, nor is a sequence that is
// attended in full.
//
// Groups of a multiple of 32 tokens, head_dim 64, 128 or 256, 1 to 8 queries a KV head, all finite.
// A query is fp16, which bf16 and fp16 ones are but for elements of less than 2^-14 of the largest.
// Its products with the steps of a group have what rounding leaves beside them in groups of up to
// four heads; in others an error is at most 2^-11 of the sum of |q step code|. Sums in fp32. Cost:
// reads each group once; one kernel.
#pragma once

#include "kernels/cuda/batches/candidates.h"
#include "kernels/ops/quantise_keys/device_groups.h"

namespace kvstrata::cuda {

struct ScoreBitsBatch {
  DeviceGroups groups;
  CandidateRule rule;               // unit_tokens 1
  const int32_t* tokens = nullptr;  // device [batch]
  const void* q = nullptr;          // device [batch][query_heads][head_dim], 16-byte aligned
  DType q_dtype = DType::kBF16;
  int32_t batch = 0, query_heads = 0;
  float scale = 1.0f;
  float* logits = nullptr;       // device [batch][query_heads][candidate_stride]
  int32_t candidate_stride = 0;  // candidates a sequence may have
};

// cudaErrorInvalidValue for a shape that it does not take.
int ScoreBitsCuda(const ScoreBitsBatch& work, Stream stream);

}  // namespace kvstrata::cuda
