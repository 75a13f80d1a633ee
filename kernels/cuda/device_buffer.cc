// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device_buffer.h"

#include <string>
#include <utility>

namespace kvstrata {

Status CudaStatus(const cuda::CudaOps& ops, int code, const char* what) {
  if (code == 0) return OkStatus();
  return Internal("CUDA_ERROR", std::string(what) + ": " + ops.error_text(code));
}

DeviceBuffer::~DeviceBuffer() { (void)Free(); }

Status DeviceBuffer::Free() {
  void* const data = std::exchange(data_, nullptr);
  bytes_ = 0;
  if (data == nullptr) return OkStatus();
  return CudaStatus(*ops_, ops_->free_device(data), "freeing a buffer of the step");
}

Status DeviceBuffer::Reserve(const cuda::CudaOps& ops, uint64_t bytes) {
  if (bytes <= bytes_) return OkStatus();
  ops_ = &ops;
  KVS_RETURN_IF_ERROR(Free());
  if (const int error = ops.allocate_device(bytes, &data_); error != 0) {
    data_ = nullptr;
    return ResourceExhausted("GPU_MEMORY", std::to_string(bytes) +
                                               " bytes for a step: " + ops.error_text(error) +
                                               "; give the daemon's device pool less");
  }
  bytes_ = bytes;
  return OkStatus();
}

void PageLockedBuffer::Free() {
  if (data_ != nullptr) (void)ops_->free_page_locked(data_);
  data_ = nullptr;
  bytes_ = 0;
}

Status PageLockedBuffer::Reserve(const cuda::CudaOps& ops, uint64_t bytes) {
  if (bytes <= bytes_) return OkStatus();
  Free();
  ops_ = &ops;
  if (const int error = ops.allocate_page_locked(bytes, &data_); error != 0) {
    data_ = nullptr;
    return ResourceExhausted(
        "GPU_MEMORY", std::to_string(bytes) + " bytes of page-locked memory: " +
                          ops.error_text(error) + "; free memory of the host, or raise ulimit -l");
  }
  bytes_ = bytes;
  return OkStatus();
}

}  // namespace kvstrata
