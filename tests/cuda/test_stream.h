// SPDX-License-Identifier: Apache-2.0
// A stream that does not wait for the default one.
#ifndef KVSTRATA_TESTS_CUDA_TEST_STREAM_H_
#define KVSTRATA_TESTS_CUDA_TEST_STREAM_H_

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

#endif  // KVSTRATA_TESTS_CUDA_TEST_STREAM_H_
