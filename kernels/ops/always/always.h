// SPDX-License-Identifier: Apache-2.0
// Op always, of a GPU: what a query's heads give to the rows that are attended whatever is chosen,
// and by how much the quantised logits of the other rows scatter. With these op vote makes its
// votes shares of all attention (docs/spec/bits.md 3).
//
// For each query head, three floats:
//   the maximum of scale * q.k over the tokens [0, first) and [last, tokens), times log2(e)
//   the sum over them of 2^(x - maximum)
//   exp(-noise / 2), noise as BitsNoise has it (kernels/ops/score_bits) over the sealed groups
// with [first, last) the candidates in tokens. Of a sequence that is attended in full nothing is
// written.
#pragma once

#include "kernels/cuda/batches/candidates.h"
#include "kernels/cuda/batches/device_rows.h"
#include "kernels/ops/quantise_keys/device_groups.h"

namespace kvstrata::cuda {

inline constexpr int kAlwaysFloats = 3;  // floats of a query head

struct AlwaysBatch {
  DeviceRows keys;      // the newest among them
  DeviceGroups groups;  // hold all tokens below the last, in whole groups
  float scale = 1.0f;   // > 0
  CandidateRule rule;
  const int32_t* tokens = nullptr;  // device [batch]
  const void* q = nullptr;          // device [batch][query_heads][head_dim]
  DType q_dtype = DType::kBF16;
  int32_t batch = 0, query_heads = 0;
  float* always = nullptr;  // device [batch][query_heads][kAlwaysFloats], written
};

// The truth; all of the batch's memory is the host's.
void AlwaysRef(const AlwaysBatch& work);

}  // namespace kvstrata::cuda
