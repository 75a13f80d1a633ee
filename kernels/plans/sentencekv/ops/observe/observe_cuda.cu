// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/plans/sentencekv/ops/observe/observe_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // floats that a thread copies at a time

// Grid (tokens that are kept, batch).
__global__ __launch_bounds__(kThreads) void ObserveKernel(ObserveBatch w) {
  WaitForPrevious();
  LetNextStart();
  const int64_t row = int64_t{blockIdx.y} * w.new_tokens + w.new_tokens - gridDim.x + blockIdx.x;
  const int64_t slot = int64_t{w.layer} * w.capacity + (w.visible[row] - 1) % w.capacity;
  float* const to = w.tables[blockIdx.y].observed + slot * w.query_floats;
  for (int i = threadIdx.x * kPiece; i < w.query_floats; i += kThreads * kPiece) {
    float x[kPiece];
    LoadFloats(w.q, w.q_dtype, row * w.query_floats + i, x);
    auto* out = reinterpret_cast<float4*>(to + i);
    out[0] = {x[0], x[1], x[2], x[3]};
    out[1] = {x[4], x[5], x[6], x[7]};
  }
}

}  // namespace

int ObserveCuda(const ObserveBatch& w, Stream stream) {
  if (w.capacity < 1 || w.new_tokens < 1 || w.query_floats % kPiece != 0 || w.batch > 65535) {
    return cudaErrorInvalidValue;
  }
  if (w.batch == 0) return cudaSuccess;
  const dim3 grid(std::min(w.new_tokens, w.capacity), w.batch);
  return LaunchDependent(ObserveKernel, grid, kThreads, 0, stream, w);
}

}  // namespace kvstrata::cuda
