// SPDX-License-Identifier: Apache-2.0
// Op copy_rows on the GPU (contract: copy_rows.h): one thread an element, one kernel. Cost: reads
// and writes each element once.
#pragma once

#include "kernels/ops/copy_rows/copy_rows.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that it does not take.
int CopyRowsCuda(const CopyRowsBatch& work, Stream stream);

}  // namespace kvstrata::cuda
