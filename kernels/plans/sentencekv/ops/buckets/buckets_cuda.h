// SPDX-License-Identifier: Apache-2.0
// Op buckets on the GPU (contract: buckets.h). Means: sums in fp32 in order of position. The kernel
// after does not start before they are complete: op pick_buckets reads buckets before it waits.
#pragma once

#include "kernels/plans/sentencekv/ops/buckets/buckets.h"

namespace kvstrata::cuda {

// Two kernels: a CTA a row, then a warp a bucket. Cost: reads the kept keys once.
int PromptBucketsCuda(const PromptBucketsBatch& work, Stream stream);

// One kernel, a warp a sentence and row. Cost: reads the sentences' keys once.
int WholeBucketsCuda(const WholeBucketsBatch& work, Stream stream);

}  // namespace kvstrata::cuda
