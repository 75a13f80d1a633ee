// SPDX-License-Identifier: Apache-2.0
// Op take on the GPU: of each list of votes how many to take, for op pick, with no host round trip.
// As Take (take.h) for the same votes, but for one where its sum in fp64, which is added in another
// order, rounds across a whole number. A list of a sequence that is attended in full takes 0.
//
// One kernel, a CTA a list: a histogram in shared memory, and a scan of it. Cost: reads the votes
// once; a CTA alone takes about 4 us for each 64K of them.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/batches/candidates.h"

namespace kvstrata::cuda {

struct TakeBatch {
  const float* votes = nullptr;  // device [batch][groups][vote_stride], 0 or more
  int32_t vote_stride = 0;       // candidates a list may have
  int32_t batch = 0, groups = 1;
  CandidateRule rule;
  const int32_t* tokens = nullptr;  // device [batch]
  double missed = 0;                // the sum that may be left
  int32_t most = 0;                 // to take, 0 or more
  int32_t* takes = nullptr;         // device [batch][groups], written
};

// cudaErrorInvalidValue for a shape that it does not take.
int TakeCuda(const TakeBatch& work, Stream stream);

}  // namespace kvstrata::cuda
