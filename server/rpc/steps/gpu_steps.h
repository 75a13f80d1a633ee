// SPDX-License-Identifier: Apache-2.0
// The StepDevice of pages in the daemon's GPU: CudaStep (kernels/step/gpu/cuda_step.h) on a stream
// of the session's own, of low priority.
//
// Tensors go through page-locked memory to the GPU and back; every call waits for what it enqueued,
// at most `patience`, by asking, never in the driver: GPU_STUCK after that, and the next call waits
// for it first. A step that is dropped waits too, because its pages may go to somebody else; a GPU
// that is not done with it after `patience` is as good as lost, and its pool with it.
// Memory of the GPU, outside of the pool: a CudaWorkspace for each step that is open at a time, and
// two copies of a layer's tensors.
#ifndef KVSTRATA_SERVER_RPC_STEPS_GPU_STEPS_H_
#define KVSTRATA_SERVER_RPC_STEPS_GPU_STEPS_H_

#include <chrono>

#include "kernels/cuda/cuda_ops.h"
#include "server/rpc/steps/step_runner.h"
#include "server/store/store.h"

namespace kvstrata {

inline constexpr int kGpuStepsOpen = 4;  // steps of a session, at a time

// Steps on GPU number `gpu` of this process, the store's `device`. Borrows all. Makes nothing
// before the first Begin; `executor` inspects.
std::unique_ptr<StepDevice> NewGpuSteps(const cuda::CudaOps* ops, int gpu, Store* store,
                                        uint32_t device, Executor* executor,
                                        std::chrono::milliseconds patience);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_STEPS_GPU_STEPS_H_
