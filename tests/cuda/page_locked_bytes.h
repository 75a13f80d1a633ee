// SPDX-License-Identifier: Apache-2.0
// Page-locked memory of the host, which kernels read at the same address.
#pragma once

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
