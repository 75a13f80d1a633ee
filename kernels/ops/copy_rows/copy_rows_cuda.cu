// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/copy_rows/copy_rows_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 256;

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    CopyRowsKernel(const __grid_constant__ CopyRowsBatch w) {
  WaitForPrevious();
  LetNextStart();
  const int64_t row_elements = int64_t{w.heads} * w.dim, count = w.rows * row_elements;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / row_elements;
    const int32_t head = static_cast<int32_t>(i % row_elements) / w.dim;
    const int32_t c = static_cast<int32_t>(i % row_elements) % w.dim;
    const auto* from = reinterpret_cast<const From*>(
        static_cast<const char*>(w.from) + row * w.from_row_stride + head * w.from_head_stride);
    auto* to = reinterpret_cast<To*>(static_cast<char*>(w.to) + row * w.to_row_stride +
                                     head * w.to_head_stride);
    to[c] = Rounded<To>(FloatOf(from[c]));
  }
}

template <typename From, typename To>
int Launch(const CopyRowsBatch& w, Stream stream) {
  const int64_t count = int64_t{w.rows} * w.heads * w.dim;
  const auto ctas =
      static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 4096));
  return LaunchDependent(CopyRowsKernel<From, To>, dim3(ctas), kThreads, 0, stream, w);
}

template <typename From>
int LaunchFrom(const CopyRowsBatch& w, Stream stream) {
  switch (w.to_dtype) {
    case DType::kF32:
      return Launch<From, float>(w, stream);
    case DType::kF16:
      return Launch<From, __half>(w, stream);
    case DType::kBF16:
      return Launch<From, __nv_bfloat16>(w, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int CopyRowsCuda(const CopyRowsBatch& w, Stream stream) {
  if (w.rows < 0 || w.heads < 1 || w.dim < 1) return cudaErrorInvalidValue;
  if (w.rows == 0) return cudaSuccess;
  switch (w.from_dtype) {
    case DType::kF32:
      return LaunchFrom<float>(w, stream);
    case DType::kF16:
      return LaunchFrom<__half>(w, stream);
    case DType::kBF16:
      return LaunchFrom<__nv_bfloat16>(w, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvstrata::cuda
