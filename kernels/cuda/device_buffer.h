// SPDX-License-Identifier: Apache-2.0
// DeviceBuffer, PageLockedBuffer: memory of a GPU, and of the host for copies that nobody waits
// for, that steps (cuda_step.h) and packers (cuda_packer.cc) keep from one run to the next.
//
// Ownership: borrow the table of ops. Threads: one call at a time. The device is the one that is
// current in Reserve. Cost: Reserve and Free may wait for the GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/cuda_ops.h"

namespace kvstrata {

// What a call of the table answered, as a Status: OK, or INTERNAL CUDA_ERROR that names `what`.
Status CudaStatus(const cuda::CudaOps& ops, int code, const char* what);

// Memory of a GPU that only grows. What was in it is lost then; new memory is zeroed.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer();

  // RESOURCE_EXHAUSTED GPU_MEMORY.
  Status Reserve(const cuda::CudaOps& ops, uint64_t bytes);
  Status Free();

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  const cuda::CudaOps* ops_ = nullptr;
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// Memory of the host that only grows. What was in it is lost then.
class PageLockedBuffer {
 public:
  PageLockedBuffer() = default;
  PageLockedBuffer(const PageLockedBuffer&) = delete;
  PageLockedBuffer& operator=(const PageLockedBuffer&) = delete;
  ~PageLockedBuffer() { Free(); }

  // RESOURCE_EXHAUSTED GPU_MEMORY.
  Status Reserve(const cuda::CudaOps& ops, uint64_t bytes);

  template <typename T>
  T* At(uint64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset);
  }

 private:
  void Free();

  const cuda::CudaOps* ops_ = nullptr;
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace kvstrata
