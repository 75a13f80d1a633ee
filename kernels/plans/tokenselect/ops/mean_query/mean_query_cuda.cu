// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/plans/tokenselect/ops/mean_query/mean_query_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 8;  // warps of a CTA: each sums every eighth row of 32 channels

// Grid (row_floats / 32).
template <typename T>
__global__ __launch_bounds__(kWarps * 32) void MeanQueryKernel(MeanQueryBatch w) {
  __shared__ double sums[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  WaitForPrevious();
  LetNextStart();
  const int channel = static_cast<int>(blockIdx.x) * 32 + lane;
  const T* from = static_cast<const T*>(w.q) + channel;
  double sum = 0;
#pragma unroll 8
  for (int row = warp; row < w.rows; row += kWarps) {
    sum += FloatOf(from[int64_t{row} * w.row_floats]);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0) return;
  for (int i = 1; i < kWarps; ++i) sum += sums[i][lane];
  w.mean[channel] = static_cast<float>(sum / w.rows);
}

template <typename T>
int Launch(const MeanQueryBatch& w, Stream stream) {
  return LaunchDependent(MeanQueryKernel<T>, dim3(w.row_floats / 32), kWarps * 32, 0, stream, w);
}

}  // namespace

int MeanQueryCuda(const MeanQueryBatch& w, Stream stream) {
  if (w.rows < 1 || w.row_floats < 32 || w.row_floats % 32 != 0) return cudaErrorInvalidValue;
  switch (w.q_dtype) {
    case DType::kF32:
      return Launch<float>(w, stream);
    case DType::kF16:
      return Launch<__half>(w, stream);
    case DType::kBF16:
      return Launch<__nv_bfloat16>(w, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvstrata::cuda
