// SPDX-License-Identifier: Apache-2.0
// Op always on the GPU (contract: always.h): one kernel, a CTA for each KV head of a sequence; sums
// in fp32 in a fixed order, relative error <= 1e-3. Rows bf16 or fp16, head_dim 64, 128 or 256, 1
// to 8 queries a KV head. Cost: reads the rows once, and the steps of one group in eight: at a
// million tokens a CTA goes through 64 of them a warp.
#pragma once

#include "kernels/ops/always/always.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that it does not take.
int AlwaysCuda(const AlwaysBatch& work, Stream stream);

}  // namespace kvstrata::cuda
