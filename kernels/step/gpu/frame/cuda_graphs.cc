// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_graphs.h"

#include <algorithm>
#include <utility>

namespace kvstrata {

void CudaGraphs::ForgetOlder(uint64_t generation) {
  if (std::exchange(generation_, generation) == generation) return;
  captured_.clear();
  called_.clear();
}

CudaGraphs::Captured& CudaGraphs::CaptureOf(uint64_t generation,
                                            const std::vector<CudaPart>& parts) {
  ForgetOlder(generation);
  for (Captured& batch : captured_) {
    if (batch.parts == parts) return batch;
  }
  const std::vector<uint8_t> none(layers_);
  return captured_.emplace_back(Captured{parts, none, none});
}

CudaGraphs::Called& CudaGraphs::CallsOf(uint64_t generation, const std::vector<CudaPart>& parts) {
  ForgetOlder(generation);
  for (Called& batch : called_) {
    if (batch.parts == parts) return batch;
  }
  if (called_.size() == kMostCalled) called_.clear();
  Called& batch = called_.emplace_back();
  batch.parts = parts;
  batch.selects.resize(layers_);
  batch.attends.resize(layers_);
  return batch;
}

const std::vector<CudaGraphs::Captured>& CudaGraphs::captured(uint64_t generation) {
  ForgetOlder(generation);
  return captured_;
}

int CudaGraphs::calls(uint64_t generation) {
  ForgetOlder(generation);
  int64_t graphs = 0;
  for (const Called& batch : called_) {
    graphs += std::ranges::count_if(batch.selects, &RepeatedCall::has_graph) +
              std::ranges::count_if(batch.attends, &RepeatedCall::has_graph);
  }
  return static_cast<int>(graphs);
}

}  // namespace kvstrata
