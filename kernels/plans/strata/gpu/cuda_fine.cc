// SPDX-License-Identifier: Apache-2.0
// Selector `fine` on a GPU (kernels/plans/strata/fine.h): no list is made; what it says of a layer
// is what CudaPlanes gives op attend_planes.
#include <string>

#include "kernels/plans/strata/fine.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"

namespace kvstrata {
namespace {

class CudaFine final : public CudaSelector {
 public:
  CudaSelectorTraits traits(const Plan&) override { return {.queries = CudaQueries::kNone}; }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart&) const override { return {}; }

  Result<Selection> Read(const CudaFrame&, const CudaPart& part, int, int32_t n) const override {
    Selection selection;
    SelectFine(part.plan, n, &selection);
    return selection;
  }
};

Status FineServes(const Plan& plan) {
  if (plan.fine.run == 1) return OkStatus();
  return PlanUnserved("run", std::to_string(plan.fine.run),
                      "op attend_planes by a share of whole runs");
}

}  // namespace

constinit const CudaSelectorRow kCudaFine = {kOverPlanes, "", FineServes,
                                             MakeCudaSelector<CudaFine>};

}  // namespace kvstrata
