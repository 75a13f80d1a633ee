// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_selector_rows.h"

namespace kvstrata {

std::span<const CudaSelectorRow* const> CudaSelectorRows() { return kCudaSelectorRows; }

}  // namespace kvstrata
