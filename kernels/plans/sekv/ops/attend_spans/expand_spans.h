// SPDX-License-Identifier: Apache-2.0
// The second op of plan sekv: which spans each query head reads token by token
// (kernels/plans/sekv/zoom.cc).
//
// Each query head takes, in descending relevance (ties to the lower index, NaN last), the spans
// whose relevance exceeds ln(tau / (1 - tau)); one whose n - 1 rows no longer fit into what is left
// of `room` is passed over. Their coarse logit becomes -inf. The spans of all heads of a KV head
// make one list, so that factors are read once for all of them.
#pragma once

#include "kernels/plans/sekv/ops/attend_spans/span_layer.h"

namespace kvstrata::cuda {

// `room` of a sequence that reads all spans token by token, whatever tau is.
inline constexpr int32_t kExpandAll = -1;

struct ExpandSpansBatch {
  SpanLayer layer;
  int32_t batch = 0;
  const float* relevance = nullptr;  // device [batch][query_heads][span_stride]
  float* coarse = nullptr;           // device, the same: changed
  const int32_t* room = nullptr;     // device [batch], rows or kExpandAll
  // The list of a KV head, ascending: span << 8 | heads of the group that read it, a bit each; once
  // for every piece of the span.
  uint32_t* list = nullptr;      // device [batch][kv_heads][kSpanPieces * span_stride]
  int32_t* counts = nullptr;     // device [batch][kv_heads]
  uint32_t* chosen = nullptr;    // device scratch [batch][query_heads][span_stride / 32]
  uint32_t* counters = nullptr;  // device [batch][kv_heads], 0 before the first call, after each
  bool ahead = false;            // launch.cuh; of parts, their spans, routers and rooms
};

// The truth; all of the batch's memory, extents included, is the host's. `chosen` and counters are
// not used.
void ExpandSpansRef(const ExpandSpansBatch& work);

}  // namespace kvstrata::cuda
