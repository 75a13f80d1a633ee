// SPDX-License-Identifier: Apache-2.0
// What a function enqueues, captured once and replayed. Errors of CUDA end the program.
#pragma once

#include <cuda_runtime_api.h>

#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class CapturedGraph {
 public:
  // enqueue(stream) returns 0 or an error.
  template <typename Enqueue>
  explicit CapturedGraph(Enqueue enqueue) : CapturedGraph(NewStream(), enqueue) {
    owns_stream_ = true;
  }
  // Captures on a stream of the caller's.
  template <typename Enqueue>
  CapturedGraph(cudaStream_t stream, Enqueue enqueue) : stream_(stream) {
    // This thread's alone: another one may allocate meanwhile.
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "BeginCapture");
    Check(enqueue(stream_), "an op under capture");
    cudaGraph_t graph = nullptr;
    Check(cudaStreamEndCapture(stream_, &graph), "EndCapture");
    Check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  CapturedGraph(const CapturedGraph&) = delete;
  ~CapturedGraph() {
    cudaGraphExecDestroy(graph_);
    if (owns_stream_) cudaStreamDestroy(stream_);
  }

  void Launch() { Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch"); }
  void Replay() {
    Launch();
    Check(cudaStreamSynchronize(stream_), "a graph");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  static cudaStream_t NewStream() {
    cudaStream_t stream = nullptr;
    Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }

  cudaStream_t stream_ = nullptr;
  bool owns_stream_ = false;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace kvstrata::cuda
