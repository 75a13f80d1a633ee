// Op attend_chunk on the GPU: attention of a chunk of a sequence's new tokens (prefill) over rows
// on pages, all of them or a selection that the chunk shares. What attend_raw does for one new
// token a sequence; here each key and value serves many queries.
//
// A tile is 128 query rows (64 with head_dim 256) of one KV head: new tokens in order, each with
// its query group. It reads rows up to the last position that one of its queries sees, in as many
// parts as fill the GPU; the last CTA to finish a tile merges its parts in their order: the same
// inputs on the same GPU give the same bits.
//
// Cost: 4 * rows * query_heads * head_dim operations on tensor cores an attended row; each row is
// read once a tile, for the most part from the L2; one launch. A chunk of few rows still costs a
// whole tile a KV head.
// Accuracy: products and sums in fp32, weights rounded to the rows' dtype before they meet values.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_CHUNK_ATTEND_CHUNK_CUDA_H_
#define KVSTRATA_KERNELS_OPS_ATTEND_CHUNK_ATTEND_CHUNK_CUDA_H_

#include "kernels/cuda/batch.h"
#include "kernels/ops/merge/partials.h"

namespace kvstrata::cuda {

inline constexpr int32_t kAttendChunkRows = 4096;  // new tokens of a call, at most

struct AttendChunkBatch {
  PagedLayer layer;           // of one sequence; head_dim 64, 128 or 256
  DeviceSelection selection;  // its first sequence's, for every query row; as in AttendRawBatch
  int32_t rows = 0;           // new tokens, up to kAttendChunkRows
  int32_t group = 0;          // query heads a KV head, 1..8
  // Device [rows]: positions that each new token sees, its own included. Ascending.
  const int32_t* tokens = nullptr;
  const void* q = nullptr;  // device [rows][kv_heads * group][head_dim], layer.dtype
  int64_t q_stride = 0;     // bytes from a token's queries to the next's; 16-aligned
  float scale = 1.0f;       // of logits, > 0

  AttentionOutput to;            // [rows] in place of [batch]
  uint32_t* counters = nullptr;  // device [kv_heads * (rows * group / 64 + 1)], 0 before the first
                                 // call and after each
  float* workspace = nullptr;    // device, AttendChunkWorkspaceBytes, any content, 16-byte aligned
};

// Enough for any chunk of this head_dim on the current GPU (52 MB of an H100).
int64_t AttendChunkWorkspaceBytes(int32_t head_dim);

// cudaErrorInvalidValue: a shape outside the ranges above. Calls that share counters or workspace
// must be ordered by a stream.
int AttendChunkCuda(const AttendChunkBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_CHUNK_ATTEND_CHUNK_CUDA_H_
