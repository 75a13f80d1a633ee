// A stream and a graph captured from it, for tests and benchmarks.
#ifndef KVSTRATA_TESTS_CUDA_GRAPH_H_
#define KVSTRATA_TESTS_CUDA_GRAPH_H_

#include <cuda_runtime_api.h>

#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class OwnedStream {
 public:
  OwnedStream() {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  OwnedStream(const OwnedStream&) = delete;
  ~OwnedStream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void Wait() const { Check(cudaStreamSynchronize(stream_), "kernels of a stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `enqueue` puts on the stream, to be replayed.
class Graph {
 public:
  template <class Fn>
  Graph(const OwnedStream& on, const Fn& enqueue) : stream_(on.get()) {
    cudaGraph_t graph = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin capture");
    enqueue();
    Check(cudaStreamEndCapture(stream_, &graph), "end capture");
    Check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  Graph(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(graph_); }
  void Replay() const { Check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch"); }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_GRAPH_H_
