// Launches of CTAs that meet: cooperative, or clusters; dependent, as of LaunchDependent.
#ifndef KVSTRATA_KERNELS_OPS_PICK_LAUNCH_TOGETHER_CUH_
#define KVSTRATA_KERNELS_OPS_PICK_LAUNCH_TOGETHER_CUH_

#include "kernels/cuda/launch.cuh"

namespace kvstrata::cuda {

inline cudaLaunchAttribute ClusterOf(unsigned ctas) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ctas, 1, 1};
  return cluster;
}

inline cudaLaunchAttribute Cooperative() {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  return cooperative;
}

// 0 or a cudaError_t. Beyond 48 KB of `shared_bytes`, AllowShared first.
template <typename... Args>
int LaunchTogether(void (*kernel)(Args...), const cudaLaunchAttribute& together, dim3 grid,
                   int threads, size_t shared_bytes, Stream stream, Args... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0] = together;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = DeviceAttribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_PICK_LAUNCH_TOGETHER_CUH_
