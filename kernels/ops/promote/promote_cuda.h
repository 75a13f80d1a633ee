// SPDX-License-Identifier: Apache-2.0
// Ops promote and rebase on the GPU (contract: promote.h), with no host round trip.
//
// REQUIRES: layer.hot, tokens and committed are written by a copy, or before the kernel that is
// enqueued before this one: they are read while that kernel runs.
//
// promote is one kernel: several CTAs a list find out the same, share the copies, and the last one
// to finish writes entries, owners and stamps. Cost: where nothing is missing three reads in a row
// (the list, its entries, stamps written), else 16-byte reads over the bus, about as fast as it
// goes. rebase is one kernel over all rows of the pages.
#pragma once

#include "kernels/ops/promote/promote.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that they do not take.
int PromoteCuda(const PromoteBatch& work, Stream stream);
int RebaseCuda(const RebaseBatch& work, Stream stream);

}  // namespace kvstrata::cuda
