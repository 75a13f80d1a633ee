// SPDX-License-Identifier: Apache-2.0
// What the budget of selector zoom leaves for expansions (docs/spec/sekv.md 7), for its steps on
// CPUs and on GPUs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/ops/pick/pick.h"
#include "kernels/plan/plan.h"
#include "kernels/plans/sekv/lowrank.h"

namespace kvstrata {

// Rows per head and step over n tokens; 0: no limit.
inline int64_t ZoomBudget(const Plan& plan, int32_t n) {
  return plan.zoom.rows < 0 ? CeilShare(plan.zoom.rows_share, n) : plan.zoom.rows;
}

inline bool ZoomsInFull(const Plan& plan, int32_t n) {
  return n < plan.min_tokens || ZoomBudget(plan, n) >= n;
}

// Rows that are read whatever is expanded.
inline int64_t PersistentRows(const SpanStorage& spans, int32_t n) {
  return int64_t{spans.raw_rows()} + std::max(n - spans.end(), 0) +
         static_cast<int64_t>(spans.spans().size());
}

// Rows that expansions may add.
inline int64_t ZoomRoom(const Plan& plan, const SpanStorage& spans, int32_t n) {
  const int64_t budget = ZoomBudget(plan, n);
  if (budget == 0) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(budget - PersistentRows(spans, n), 0);
}

// What scoring the spans of a layer reads: mean keys, and norms where routers are trained.
inline int64_t ZoomScoredBytes(const SpanStorage& spans, const Geometry& g) {
  const int64_t norms = spans.trained() ? g.query_heads * SizeOf(DType::kF32) : 0;
  return static_cast<int64_t>(spans.spans().size()) *
         (g.kv_heads * g.head_dim * SizeOf(DType::kBF16) + norms);
}

}  // namespace kvstrata
