// SPDX-License-Identifier: Apache-2.0
// Selector `window` on a GPU.
#include "kernels/step/gpu/frame/cuda_selector_rows.h"

namespace kvstrata {

extern const FixedSelection kWindowSelection;  // window.cc

constinit const CudaSelectorRow kCudaWindow = {kOverRaw, "op attend_packed over runs of positions",
                                               ServesAll, MakeCudaFixed<kWindowSelection>};

}  // namespace kvstrata
