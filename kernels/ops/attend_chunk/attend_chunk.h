// SPDX-License-Identifier: Apache-2.0
// Op attend_chunk: attention of a chunk of a sequence's new tokens (prefill) over rows on pages,
// all of them or a selection that the chunk shares. What attend_raw does for one new token a
// sequence; here each key and value serves many queries.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/ops/merge/partials.h"

namespace kvstrata::cuda {

inline constexpr int32_t kAttendChunkRows = 4096;  // new tokens of a call, at most

struct AttendChunkBatch {
  PagedLayer layer;           // pages of one sequence; head_dim 64, 128 or 256
  DeviceSelection selection;  // its first sequence's, for every query row; as in AttendRawBatch
  int32_t rows = 0;           // new tokens, up to kAttendChunkRows
  int32_t group = 0;          // query heads a KV head, 1..8
  // Device [rows]: positions that each new token sees, its own included. Ascending.
  const int32_t* tokens = nullptr;
  const void* q = nullptr;  // device [rows][kv_heads * group][head_dim], layer.dtype
  int64_t q_stride = 0;     // bytes from a token's queries to the next's; 16-aligned
  float scale = 1.0f;       // factor of the logits, > 0

  AttentionOutput to;            // [rows] in place of [batch]
  uint32_t* counters = nullptr;  // device [kv_heads * (rows * group / 64 + 1)], 0 before the first
                                 // call and after each
  float* workspace = nullptr;    // device, AttendChunkWorkspaceBytes, any content, 16-byte aligned
};

// The truth; all of the batch's memory is the host's. Counters and workspace are not used.
void AttendChunkRef(const AttendChunkBatch& work);

}  // namespace kvstrata::cuda
