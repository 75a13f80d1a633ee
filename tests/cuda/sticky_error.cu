// SPDX-License-Identifier: Apache-2.0
// For sticky_error_cuda_test: preloaded into a daemon it waits for a byte from the FIFO named by
// KVS_STICKY_FIFO and then runs a kernel that writes to an address that nobody has. The primary
// context is the daemon's own: all its later calls answer cudaErrorIllegalAddress.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

__global__ void WriteNowhere(int* nowhere) { *nowhere = 1; }

__attribute__((constructor)) void AwaitByte() {
  const char* const path = std::getenv("KVS_STICKY_FIFO");
  if (path == nullptr) return;
  std::thread([path] {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    char byte = 0;
    if (read(fd, &byte, 1) != 1) return;
    WriteNowhere<<<1, 1>>>(reinterpret_cast<int*>(uintptr_t{64}));
    const cudaError_t launched = cudaGetLastError();
    std::fprintf(stderr, "sticky_error: launched: %s; finished: %s\n", cudaGetErrorString(launched),
                 cudaGetErrorString(cudaDeviceSynchronize()));
  }).detach();
}

}  // namespace
