// SPDX-License-Identifier: Apache-2.0
// Op attend_raw on the GPU: attention of one query token a sequence (decode) over rows on pages,
// and the merge of its splits, in one kernel.
//
// Work is counted in strips of 32 attended rows of one (sequence, KV head). A grid of as many CTAs
// as the GPU holds shares the strips of the whole batch evenly, whatever the lengths are; the last
// CTA to finish a (sequence, KV head) merges its splits in their order. The same inputs on the same
// GPU give the same bits. Another batch splits otherwise: equal within rounding. Given the newest
// rows themselves, it does what op append would do before it.
//
// Cost: reads each attended key and value once, at the bandwidth of the memory; one launch.
// Accuracy: products and sums in fp32, weights rounded to the rows' dtype before they meet values.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/ops/append/append_cuda.h"
#include "kernels/ops/merge/partials.h"

namespace kvstrata::cuda {

// One row's queries, kept for whoever asks afterwards what the step chose for them: a captured
// graph leaves nothing else of a step. Of no row where `row` is outside the batch.
struct KeptQueries {
  const int32_t* row = nullptr;  // device, complete before the launch; null: none are kept
  void* to = nullptr;  // device [kv_heads * group][head_dim], layer.dtype, 16-byte aligned
};

struct AttendRawBatch {
  PagedLayer layer;           // head_dim 64, 128 or 256
  DeviceSelection selection;  // listed rows outside [sink_end, recent_begin) are left out; sink_end
                              // and recent_begin null: all rows are attended
  int32_t batch = 0;
  int32_t group = 0;                // query heads a KV head, 1..8
  const int32_t* tokens = nullptr;  // device [batch], rows of each sequence, the new one's included
  const void* q = nullptr;          // device [batch][kv_heads * group][head_dim], layer.dtype
  int64_t q_stride = 0;             // bytes from a sequence's queries to the next's; 16-aligned
  float scale = 1.0f;               // factor of the logits
  bool ahead = false;  // launch.cuh; of the pages, tokens and selection, and of all rows but each
                       // sequence's newest

  // Row b of both: the newest row of sequence b, where it is not on its page yet. It is attended
  // from here, whatever the selection says, and written to its page. data null: it is there.
  DeviceSource new_k, new_v;
  NotFiniteWords not_finite;  // for the new rows

  KeptQueries kept;
  Partials with;       // other ops' on the same queries, merged into the output
  AttentionOutput to;  // to.rows null: `partial` is written instead
  Partials partial;    // 1 part: what merge.h calls a partial, over all attended rows
  // device, AttendRawWorkspaceBytes, 16-byte aligned; all zero before the first call and after each
  void* workspace = nullptr;
};

// Enough for any batch of this group and head_dim on the current GPU (about 2 MB).
int64_t AttendRawWorkspaceBytes(int32_t group, int32_t head_dim);

// cudaErrorInvalidValue: a shape outside the ranges above. Calls that share a workspace must be
// ordered by a stream.
int AttendRawCuda(const AttendRawBatch& work, Stream stream);

}  // namespace kvstrata::cuda
