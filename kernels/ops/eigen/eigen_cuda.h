// SPDX-License-Identifier: Apache-2.0
// Op eigen on the GPU (contract: eigen.h): eigenvectors of many symmetric matrices, a CTA each.
//
// Cyclic Jacobi in fp32, not fp64: eigenvalues within 1e-5 of the largest, vectors orthogonal
// within 1e-5. Directions whose eigenvalues are closer than that come out mixed. The same inputs
// give the same bits. Cost, d = 128: 6 to 9 sweeps of 127 rounds in shared memory; d = 256 does not
// fit there and works in the workspace, far slower.
#pragma once

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

struct EigenItem {
  uint64_t a;        // f64 [dim][dim], symmetric; not changed
  uint64_t values;   // f32 [dim], descending
  uint64_t vectors;  // f32 [dim][dim], a row a vector, 16-aligned
};

struct EigenBatch {
  int32_t dim = 0;                   // 64, 128 or 256
  const EigenItem* items = nullptr;  // device [count]
  int32_t count = 0;
  float* workspace = nullptr;  // device, EigenWorkspaceBytes, any content; null where that is 0
};

int64_t EigenWorkspaceBytes(const EigenBatch& work);

// One kernel. cudaErrorInvalidValue: another dim. Calls that share a workspace must be ordered by a
// stream.
int EigenCuda(const EigenBatch& work, Stream stream);

}  // namespace kvstrata::cuda
