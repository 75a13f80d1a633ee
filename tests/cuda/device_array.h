// SPDX-License-Identifier: Apache-2.0
// A typed array on the GPU for tests and benchmarks: fresh memory is poisoned with 0xFF (NaN in
// every float type), so that what an op did not write shows. Errors of CUDA end the program.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace kvstrata::cuda {

inline void Check(int code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(code)));
  std::abort();
}

template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t size) : size_(size) {
    Check(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T) + 1), "cudaMalloc");
    Poison();
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Write(values); }
  DeviceArray(DeviceArray&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}
  DeviceArray& operator=(DeviceArray&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  // Both are done when they return: streams that do not wait for the default one follow.
  void Poison() {
    Check(cudaMemset(data_, 0xFF, size_ * sizeof(T)), "cudaMemset");
    Check(cudaStreamSynchronize(nullptr), "cudaMemset");
  }
  void Write(const std::vector<T>& values) {
    Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy to the device");
    Check(cudaStreamSynchronize(nullptr), "cudaMemcpy to the device");
  }
  // Waits for all streams.
  std::vector<T> Read() const {
    Check(cudaDeviceSynchronize(), "kernels before a read");
    std::vector<T> values(size_);
    Check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
          "cudaMemcpy from the device");
    return values;
  }

  T* get() const { return data_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data_); }
  size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvstrata::cuda
