// SPDX-License-Identifier: Apache-2.0
// How long a replay of a captured graph takes. For all benchmarks of CUDA, and as
// dense_baselines.py and selection_baseline.py time theirs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "tests/cuda/captured_graph.h"

namespace kvstrata::cuda {

// The GPU's name. Without a GPU the program ends with 77, as a test that is skipped.
inline std::string NameOfGpu() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "SKIPPED: no GPU is visible\n");
    std::exit(77);
  }
  cudaDeviceProp device{};
  Check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  return device.name;
}

// Microseconds of a node: each replay is timed by itself, with the one before it still running
// while it is enqueued, so that nothing of the host is in it. Graphs, all of `nodes` nodes,
// alternate. Graph: a CapturedGraph, or what launches one and has a stream.
template <typename Graph>
bench::Timing TimeReplays(const std::vector<Graph*>& graphs, int nodes, int replays) {
  constexpr int kWarmUps = 5;
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> us;
  for (size_t i = 0; i < static_cast<size_t>(kWarmUps + replays); ++i) {
    Graph& before = *graphs[2 * i % graphs.size()];
    Graph& timed = *graphs[(2 * i + 1) % graphs.size()];
    before.Launch();
    Check(cudaEventRecord(begin, before.stream()), "cudaEventRecord");
    Check(cudaStreamWaitEvent(timed.stream(), begin), "cudaStreamWaitEvent");
    timed.Launch();
    Check(cudaEventRecord(end, timed.stream()), "cudaEventRecord");
    Check(cudaEventSynchronize(end), "a replay");
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i >= kWarmUps) us.push_back(double{ms} * 1e3 / nodes);
  }
  Check(cudaEventDestroy(begin), "cudaEventDestroy");
  Check(cudaEventDestroy(end), "cudaEventDestroy");
  return bench::TimingOf(us);
}

}  // namespace kvstrata::cuda
