// SPDX-License-Identifier: Apache-2.0
// Op importance on the GPU (contract: importance.h). Sums in fp32, in the items' order: the same
// input gives the same bits. Two kernels, the second with the last items. Cost: reads the votes
// once; the maximum reads `pool` sums a token.
#pragma once

#include "kernels/plans/sentencekv/ops/importance/importance.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that it does not take.
int ImportanceCuda(const ImportanceBatch& work, Stream stream);

}  // namespace kvstrata::cuda
