// SPDX-License-Identifier: Apache-2.0
// Ops attend_packed and score_packed on the GPU (contract: attend_packed.h; bytes:
// docs/extents.md): attention of one query token a sequence over chosen blocks of packed segments,
// and the scores that blocks are chosen by.
//
// A packed row is copied to shared memory, where a lane walks the channels that it stores: keys
// meet the rotated queries there, values spread to a tile for tensor cores. Queries come as they
// are: a CTA rotates them into each segment that it works on, and sums of values back, once for
// consecutive extents with the same rotations. What changes from step to step (segments, their
// ends, addresses and strategies, the selection) is read on the device.
//
// Accuracy: rotations, logits, sums in fp32; weights in bf16.
// The same inputs on the same GPU give the same bits.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/ops/merge/partials.h"

namespace kvstrata::cuda {

// One extent of one (sequence, KV head) in one layer. On the device. Addresses of rows are
// multiples of 16. Rows behind the last are never read.
struct PackedSegment {
  uint64_t r_k, r_v;              // f32 [head_dim][head_dim]
  uint64_t keys, values, blocks;  // packed rows
  int32_t rows;                   // tokens, from the first of the segment on
  int32_t first_block;            // blocks of the KV head in the segments before
  int32_t keep, neighbours;       // keep 0 .. keep_max; neighbours 1, 2 or 4
  int32_t block;                  // tokens of a block: 4, 8 or 16; the last may have fewer
  int32_t reserved;
};
static_assert(sizeof(PackedSegment) == 64);

// The packed storage of one layer of a batch.
struct PackedLayer {
  const PackedSegment* segments = nullptr;  // device [batch][segment_stride][kv_heads]
  const int32_t* counts = nullptr;          // device [batch], segments of each sequence
  int32_t segment_stride = 0;
  int32_t kv_heads = 0, head_dim = 0;  // head_dim 64, 128 or 256
  bool truncated = false;              // the lowest quarter of the channels is dropped
  int32_t keep_max = 0;                // the largest `keep` of any segment
};

// Queries of one token a sequence.
struct PackedQueries {
  const void* q = nullptr;  // device [batch][kv_heads * group][head_dim], not rotated, 16-aligned
  DType dtype = DType::kBF16;
  int64_t stride = 0;  // elements from a sequence's queries to the next's, a multiple of 8
  int32_t batch = 0;
  int32_t group = 0;  // query heads a KV head, 1..8
};

struct ScorePackedBatch {
  PackedLayer layer;
  PackedQueries queries;
  float* scores = nullptr;  // device [batch][kv_heads][score_stride], block `first` at 0
  int32_t score_stride = 0;
  int32_t first = 0;   // blocks before it get no score
  bool ahead = false;  // launch.cuh; of segments, counts, rotations and packed rows
};

// scores = max over the group of q' . block key, not scaled. One kernel; reads each block key once.
// cudaErrorInvalidValue: a shape that it does not take.
int ScorePackedCuda(const ScorePackedBatch& work, Stream stream);

struct AttendPackedBatch {
  PackedLayer layer;
  PackedQueries queries;
  // In blocks of a KV head, numbered over its segments from 0, not in tokens: unit_tokens 1, groups
  // kv_heads. sink_end and recent_begin are shared by the heads of a sequence, recent_begin at most
  // their number of blocks. unit_tokens 0: all blocks.
  DeviceSelection selection;
  float scale = 1.0f;  // factor of the logits

  Partials with;                 // other ops' on the same queries, merged into the output
  AttentionOutput to;            // to.rows null: `partial` is written instead
  Partials partial;              // 1 part: what merge.h calls a partial, over all attended rows
  uint32_t* counters = nullptr;  // device [batch * kv_heads], 0 before the first call, after each
  float* workspace = nullptr;    // device, AttendPackedWorkspaceBytes, any content, 16-aligned
  bool ahead = false;            // launch.cuh; of segments, counts, rotations and packed rows
};

int64_t AttendPackedWorkspaceBytes(const AttendPackedBatch& work);

// One kernel. cudaErrorInvalidValue: a shape outside the ranges above. Calls that share counters or
// workspace must be ordered by a stream.
int AttendPackedCuda(const AttendPackedBatch& work, Stream stream);

}  // namespace kvstrata::cuda
