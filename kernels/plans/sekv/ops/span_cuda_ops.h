// SPDX-License-Identifier: Apache-2.0
// The ops of codec lowrank on a GPU: OpsOf<cuda::SpanOps>(ops.lowrank).
#pragma once

#include "kernels/ops/plan_ops.h"
#include "kernels/plans/sekv/ops/attend_spans/attend_spans_cuda.h"
#include "kernels/plans/sekv/ops/attend_spans/expand_spans_cuda.h"
#include "kernels/plans/sekv/ops/attend_spans/score_spans_cuda.h"

namespace kvstrata::cuda {

struct SpanOps : PlanOps {
  int (*score_spans)(const ScoreSpansBatch& work, Stream stream) = nullptr;
  int (*expand_spans)(const ExpandSpansBatch& work, Stream stream) = nullptr;
  int64_t (*attend_spans_workspace_bytes)(const AttendSpansBatch& work) = nullptr;
  int (*attend_spans)(const AttendSpansBatch& work, Stream stream) = nullptr;
};

// The library's, which alone has these functions.
inline constexpr SpanOps kSpanCuda = {
    {}, ScoreSpansCuda, ExpandSpansCuda, AttendSpansWorkspaceBytes, AttendSpansCuda};

}  // namespace kvstrata::cuda
