// SPDX-License-Identifier: Apache-2.0
// Op observe on the GPU (contract: observe.h). One kernel. Cost: reads and writes the queries that
// it keeps. Positions are read on the device: a captured graph of a prompt's chunk serves the next
// one.
#pragma once

#include "kernels/plans/sentencekv/ops/observe/observe.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that it does not take.
int ObserveCuda(const ObserveBatch& work, Stream stream);

}  // namespace kvstrata::cuda
