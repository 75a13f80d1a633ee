// SPDX-License-Identifier: Apache-2.0
// The third op of plan sekv: attend_coarse and attend_lowrank (attend_coarse.h, attend_lowrank.h),
// and attend_raw for the rows that lie between spans and behind them: all that one query token a
// sequence attends, in one softmax.
//
//   expanded spans   from their factors A, B: scores A (B q), output (p A) B; or as raw rows
//   coarse rows      of all spans whose logit is not -inf
//   raw rows         of the parts
//   rows on pages    [window_begin, tokens): the local window and what was generated
#pragma once

#include "kernels/ops/merge/partials.h"
#include "kernels/plans/sekv/ops/attend_spans/span_layer.h"

namespace kvstrata::cuda {

struct AttendSpansBatch {
  SpanLayer layer;
  SpanQueries queries;
  const float* coarse = nullptr;          // device [batch][query_heads][span_stride], natural
  const uint32_t* list = nullptr;         // device, of expand_spans
  const int32_t* counts = nullptr;        // device [batch][kv_heads]
  PagedLayer pages;                       // pages of this layer; page_tokens a multiple of 16
  const int32_t* window_begin = nullptr;  // device [batch]
  const int32_t* tokens = nullptr;        // device [batch], the new one included

  Partials with;                 // other ops' on the same queries, merged into the output
  AttentionOutput to;            // to.rows null: `partial` is written instead
  Partials partial;              // 1 part: what merge.h calls a partial, over all attended rows
  uint32_t* counters = nullptr;  // device [batch * kv_heads], 0 before the first call, after each
  float* workspace = nullptr;    // device, AttendSpansWorkspaceBytes, any content, 16-aligned
  // launch.cuh, for tables and lengths. For queries and rows: expand_spans of the same layer is
  // before this op on the stream, and all that is not of spans is complete before that one's wait
  // ends.
  bool ahead = false;
};

// The truth; all of the batch's memory, extents included, is the host's. Counters and workspace are
// not used.
void AttendSpansRef(const AttendSpansBatch& work);

}  // namespace kvstrata::cuda
