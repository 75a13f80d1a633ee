// SPDX-License-Identifier: Apache-2.0
// PlanOps: ops that one plan alone has, as tables of all ops (backend.h, cuda_ops.h) hold them
// without knowing them. The plan's folder declares its own table, which derives from this.
// Constants; any thread.
#pragma once

namespace kvstrata {

struct PlanOps {};

// REQUIRES: `ops` is an Ops; it is null where the build leaves the plan out
// (kernels/plan/built_plans.h).
template <typename Ops>
const Ops& OpsOf(const PlanOps* ops) {
  return static_cast<const Ops&>(*ops);
}

}  // namespace kvstrata
