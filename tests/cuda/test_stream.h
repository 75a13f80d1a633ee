// SPDX-License-Identifier: Apache-2.0
// A stream that does not wait for the default one.
#pragma once

#include <cuda_runtime_api.h>

#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class TestStream {
 public:
  TestStream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  TestStream(const TestStream&) = delete;
  ~TestStream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace kvstrata::cuda
