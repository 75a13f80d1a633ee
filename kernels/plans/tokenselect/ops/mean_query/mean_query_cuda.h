// SPDX-License-Identifier: Apache-2.0
// Op mean_query on the GPU (contract: mean_query.h): one kernel, sums in a fixed order. Cost: reads
// each query once.
#pragma once

#include "kernels/plans/tokenselect/ops/mean_query/mean_query.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that it does not take.
int MeanQueryCuda(const MeanQueryBatch& work, Stream stream);

}  // namespace kvstrata::cuda
