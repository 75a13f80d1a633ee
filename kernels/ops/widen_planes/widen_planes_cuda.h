// SPDX-License-Identifier: Apache-2.0
// Op widen_planes on the GPU (contract: widen_planes.h), bit for bit `ref`. One kernel, a CTA for
// as many tokens of a KV head as a group has.
#pragma once

#include "kernels/ops/widen_planes/widen_planes.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that it does not take.
int WidenPlanesCuda(const WidenPlanesBatch& work, Stream stream);

}  // namespace kvstrata::cuda
