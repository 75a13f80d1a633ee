// SPDX-License-Identifier: Apache-2.0
// CudaTensors: an engine's tensors as ops take them: on the GPU, aligned, heads side by side. What
// is that already is used as it is, the rest is copied.
//
// Host memory is copied before a call returns, so that the caller may write to it then; it is
// refused under capture. Belongs to a workspace. Threads: one call at a time. Errors: CUDA_ERROR,
// GPU_MEMORY; FAILED_PRECONDITION CAPTURE_HOST_TENSOR, CAPTURE_ALLOCATES.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

class CudaFrame;  // cuda_frame.h

class CudaTensors {
 public:
  // Where a layer's attention writes.
  struct Output {
    MutableRows rows;
    float* lse = nullptr;  // null: not asked for
    bool in_place = false, lse_in_place = false;
    bool on_device = false;  // the caller's
  };

  Result<cuda::DeviceSource> Keys(const CudaFrame& frame, const Rows& k) {
    return SourceOf(frame, k, &host_k_, &dense_k_);
  }
  Result<cuda::DeviceSource> Values(const CudaFrame& frame, const Rows& v) {
    return SourceOf(frame, v, &host_v_, &dense_v_);
  }
  // Queries of the GPU's memory; these with rows and heads side by side; these as attention takes
  // them.
  Result<Rows> Queries(const CudaFrame& frame, const Rows& q);
  Result<Rows> Dense(const CudaFrame& frame, const Rows& q);
  Result<Rows> Native(const CudaFrame& frame, const Rows& q);

  Result<Output> OutputFor(const CudaFrame& frame, const MutableRows& out, float* lse);
  // Copies the output to where the caller wants it; waits where that is host memory.
  Status Store(const CudaFrame& frame, const Output& output, const MutableRows& out, float* lse);

 private:
  Result<Rows> OnDevice(const CudaFrame& frame, const Rows& rows, int32_t heads,
                        DeviceBuffer* copy);
  Result<Rows> Copied(const CudaFrame& frame, const Rows& rows, int32_t heads, DType dtype,
                      DeviceBuffer* to);
  Result<cuda::DeviceSource> SourceOf(const CudaFrame& frame, const Rows& rows, DeviceBuffer* copy,
                                      DeviceBuffer* dense);
  Status StoreRows(const CudaFrame& frame, const MutableRows& out, bool on_device);

  // Copies of the host's, dense rows, queries in the pages' dtype, outputs.
  DeviceBuffer host_k_, host_v_, host_q_, dense_k_, dense_v_, dense_q_, native_q_, out_, lse_;
};

}  // namespace kvstrata
