// SPDX-License-Identifier: Apache-2.0
// The ops of codec lowrank on a CPU: OpsOf<SpanOps>(backend.lowrank).
#ifndef KVSTRATA_KERNELS_PLANS_SEKV_OPS_SPAN_OPS_H_
#define KVSTRATA_KERNELS_PLANS_SEKV_OPS_SPAN_OPS_H_

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

#endif  // KVSTRATA_KERNELS_PLANS_SEKV_OPS_SPAN_OPS_H_
