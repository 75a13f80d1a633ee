// SPDX-License-Identifier: Apache-2.0
// Finds libkvstrata_cuda.so and its table. The only way into CUDA for everything else.
//
// Looked for in KVSTRATA_CUDA_LIBRARY (a path), else beside the library or program that this code
// is in and in its ../lib, else where the dynamic linker looks; never in the working directory.
#pragma once

#include "base/status.h"
#include "kernels/cuda/cuda_ops.h"

namespace kvstrata::cuda {

// The table; it lives as long as the process. Loaded once, thread-safe.
// UNAVAILABLE CUDA_LIBRARY (not there, or another version), CUDA_NO_DEVICE (there, but no GPU).
Result<const CudaOps*> LoadCudaOps();

}  // namespace kvstrata::cuda
