// SPDX-License-Identifier: Apache-2.0
// The first op of plan sekv (docs/spec/sekv.md 6, 8; kernels/plans/sekv/zoom.cc): one read of the
// mean keys gives both what spans are chosen by and the logits of their coarse rows.
//
//   relevance[b][h][s] = (W^T W q_h / sqrt(d')) . k_s / |W k_s| + ln n_s
//                        coarse[b][h][s] where a sequence has no routers
//   coarse[b][h][s]    = scale q_h . k_s + ln n_s
#pragma once

#include "kernels/plans/sekv/ops/attend_spans/span_layer.h"

namespace kvstrata::cuda {

struct ScoreSpansBatch {
  SpanLayer layer;
  SpanQueries queries;
  float* relevance = nullptr;  // device [batch][query_heads][span_stride]
  float* coarse = nullptr;     // device, the same
  bool ahead = false;          // launch.cuh; of parts, all in them, and routers, not of q
};

// The truth; all of the batch's memory, extents included, is the host's.
void ScoreSpansRef(const ScoreSpansBatch& work);

}  // namespace kvstrata::cuda
