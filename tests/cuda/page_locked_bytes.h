// SPDX-License-Identifier: Apache-2.0
// Page-locked memory of the host, which kernels read at the same address.
#ifndef KVSTRATA_TESTS_CUDA_PAGE_LOCKED_BYTES_H_
#define KVSTRATA_TESTS_CUDA_PAGE_LOCKED_BYTES_H_

#include <cstddef>
#include <memory>

#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

inline std::shared_ptr<std::byte[]> NewPageLocked(uint64_t bytes) {
  void* at = nullptr;
  Check(cudaMallocHost(&at, bytes), "cudaMallocHost");
  return {static_cast<std::byte*>(at), [](std::byte* memory) { (void)cudaFreeHost(memory); }};
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_PAGE_LOCKED_BYTES_H_
