// SPDX-License-Identifier: Apache-2.0
// The ops of codec lowrank on a CPU: OpsOf<SpanOps>(backend.lowrank).
#pragma once

#include "kernels/ops/plan_ops.h"
#include "kernels/plans/sekv/ops/attend_lowrank/attend_lowrank.h"
#include "kernels/plans/sekv/ops/svd/svd.h"

namespace kvstrata {

struct SpanOps : PlanOps {
  void (*attend_lowrank)(const AttendLowRankWork*, int64_t, Executor&) = nullptr;
  void (*svd)(const SvdWork*, int64_t, Executor&) = nullptr;
};

inline constexpr SpanOps kSpanSimd = {{}, AttendLowRankSimd, SvdSimd};
inline constexpr SpanOps kSpanRef = {{}, AttendLowRankRef, SvdRef};

}  // namespace kvstrata
