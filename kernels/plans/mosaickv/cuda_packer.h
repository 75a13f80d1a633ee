// SPDX-License-Identifier: Apache-2.0
// The SegmentPacker of a GPU, for plans of a fixed strategy, and raw pages in its memory.
#pragma once

#include <memory>

#include "base/status.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/plans/mosaickv/segment_packer.h"

namespace kvstrata {

// A packer on GPU number `device` of this process. Runs wait for each other, on one stream of low
// priority. Memory beside the extents: 2 head_dim^2 floats a head for a segment's plans, and
// scratch of at most some 100 MB that it keeps, and 32 MiB of extents' memory for the next ones.
// Where the GPU has no room for that it packs nothing for some seconds, and the host does. `ops`
// outlives it.
Result<std::unique_ptr<SegmentPacker>> NewCudaPacker(const cuda::CudaOps& ops, int device);

}  // namespace kvstrata
