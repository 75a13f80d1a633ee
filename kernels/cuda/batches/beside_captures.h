// SPDX-License-Identifier: Apache-2.0
// CUDA calls beside captures of other threads: what an engine may have under way while this library
// works for it.
#pragma once

#include <cuda_runtime_api.h>

namespace kvstrata::cuda {

// Lets this thread allocate and ask while some thread of the process captures a graph, which such
// calls would otherwise spoil: none of them has to do with what is captured.
class BesideCaptures {
 public:
  BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace kvstrata::cuda
