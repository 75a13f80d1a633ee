// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/plans/sentencekv/ops/importance/importance_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 256;

// Grid (tokens / kThreads, kv_heads).
__global__ __launch_bounds__(kThreads) void SumKernel(ImportanceBatch w) {
  WaitForPrevious();
  LetNextStart();
  const int32_t t = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (t >= w.tokens) return;
  const int64_t at = int64_t{blockIdx.y} * w.stride + t;
  float sum = w.first ? 0.0f : w.sums[at];
#pragma unroll 8
  for (int32_t i = 0; i < w.items; ++i) {
    sum += w.votes[int64_t{i} * w.kv_heads * w.stride + at];
  }
  w.sums[at] = sum;
}

__global__ __launch_bounds__(kThreads) void PoolKernel(ImportanceBatch w) {
  WaitForPrevious();
  LetNextStart();
  const int32_t t = w.begin + static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (t >= w.tokens) return;
  const float* const sums = w.sums + int64_t{blockIdx.y} * w.stride;
  float most = sums[t];
  const int32_t end = min(t + w.pool / 2, w.tokens - 1);
  for (int32_t i = max(t - (w.pool - 1) / 2, 0); i <= end; ++i) most = fmaxf(most, sums[i]);
  w.importance[int64_t{blockIdx.y} * w.stride + t - w.begin] = most;
}

}  // namespace

int ImportanceCuda(const ImportanceBatch& w, Stream stream) {
  if (w.items < 0 || w.kv_heads < 1 || w.pool < 1 || w.tokens > w.stride) {
    return cudaErrorInvalidValue;
  }
  if (w.tokens == 0) return cudaSuccess;
  const dim3 grid((w.tokens + kThreads - 1) / kThreads, w.kv_heads);
  const int summed = LaunchDependent(SumKernel, grid, kThreads, 0, stream, w);
  if (summed != cudaSuccess || !w.last) return summed;
  return LaunchDependent(PoolKernel, grid, kThreads, 0, stream, w);
}

}  // namespace kvstrata::cuda
