// SPDX-License-Identifier: Apache-2.0
// Op attend_chunk on the GPU (contract: attend_chunk.h).
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
#pragma once

#include "kernels/ops/attend_chunk/attend_chunk.h"

namespace kvstrata::cuda {

// Enough for any chunk of this head_dim on the current GPU (52 MB of an H100).
int64_t AttendChunkWorkspaceBytes(int32_t head_dim);

// cudaErrorInvalidValue: a shape outside the ranges above. Calls that share counters or workspace
// must be ordered by a stream.
int AttendChunkCuda(const AttendChunkBatch& work, Stream stream);

}  // namespace kvstrata::cuda
