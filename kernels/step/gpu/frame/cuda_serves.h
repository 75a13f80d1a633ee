// SPDX-License-Identifier: Apache-2.0
// What steps on a GPU serve, by what the ops there can do: each selector and codec says it in the
// file of its GPU half.
//
// Pure; any thread.
#pragma once

#include <string_view>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"

namespace kvstrata {

// Whether CudaStep can serve a sequence: UNIMPLEMENTED CUDA_PLAN, which names the option, the op
// that is missing for it and what is served, or CUDA_MODEL. For opening a sequence; Begin asks it
// again. docs/plans.md, "On a GPU", lists all that is not served.
Status CudaServes(const Plan& plan, const Geometry& geometry);

// CUDA_PLAN of an option. missing: "op pick over ..."
Status PlanUnserved(std::string_view key, std::string_view value, std::string_view missing);

// For a selector that reads an index: its units, and what becomes of those that are not selected.
Status CudaIndexServes(const Plan& plan);

}  // namespace kvstrata
