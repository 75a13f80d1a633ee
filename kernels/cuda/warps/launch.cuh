// SPDX-License-Identifier: Apache-2.0
// Launches of kernels from ops, and what of the current device they depend on.
//
// LaunchDependent overlaps the start of a kernel with the end of the one before it on its stream
// (programmatic dependent launch, compute capability 9.0; elsewhere a plain launch): 0.3 us less
// for each of the short kernels of a selection on an H100. Every kernel launched so must call
// WaitForPrevious before it touches global memory: it returns when all kernels before are complete
// and their writes can be seen. What they may have written must not be read with __ldg: its cache
// is not told.
//
// The exception: with `ahead` in an op's batch, the caller says that the op's tables, lengths and
// old rows were complete before a copy, a graph's launch or an event that all kernels since are
// behind. Those are read before WaitForPrevious: several kernels of a step start at once, and their
// first rows are on the way while the ones before still run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/batches/batch.h"

namespace kvstrata::cuda {

__device__ inline void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on CTAs of the next kernel may take what is free of an SM, up to their WaitForPrevious.
__device__ inline void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// An attribute of the current device; asked each time, as a process may have several.
inline int DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// In how many CTAs each of `rows` is done, at most `most`, so that all of them run at once where
// `ctas_of_sm` share an SM: one more would make a second wave, and as good as double the time.
inline int SplitsOfWave(int ctas_of_sm, int rows, int most) {
  const int ctas = ctas_of_sm * DeviceAttribute(cudaDevAttrMultiProcessorCount);
  return std::clamp(ctas / std::max(rows, 1), 1, std::max(most, 1));
}

// Allows a kernel more dynamic shared memory than 48 KB. 0 or a cudaError_t.
template <typename... Args>
int AllowShared(void (*kernel)(Args...), int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// 0 or a cudaError_t. Beyond 48 KB of `shared_bytes`, AllowShared first.
template <typename... Args>
int LaunchDependent(void (*kernel)(Args...), dim3 grid, int threads, size_t shared_bytes,
                    Stream stream, Args... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = DeviceAttribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// launch.template operator()<T, kDim>() for 16-bit rows of a head dim that kernels exist for, else
// cudaErrorInvalidValue. The only two things that kernels are templates of.
template <typename Launch>
int ForRows(DType dtype, int head_dim, Launch launch) {
  const auto of_dim = [&]<typename T>() {
    return head_dim == 64    ? launch.template operator()<T, 64>()
           : head_dim == 128 ? launch.template operator()<T, 128>()
           : head_dim == 256 ? launch.template operator()<T, 256>()
                             : int{cudaErrorInvalidValue};
  };
  return dtype == DType::kBF16  ? of_dim.template operator()<__nv_bfloat16>()
         : dtype == DType::kF16 ? of_dim.template operator()<__half>()
                                : int{cudaErrorInvalidValue};
}

}  // namespace kvstrata::cuda
