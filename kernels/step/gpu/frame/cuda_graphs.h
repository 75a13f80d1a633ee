// SPDX-License-Identifier: Apache-2.0
// CudaGraphs: what is known of a workspace's graphs: of which batches an engine captured all
// layers, and the small graphs of the calls that come again outside of those (repeated_call.h).
//
// All of it is forgotten when the workspace's memory has grown: the graphs hold addresses that are
// gone. Threads: one call at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/step/gpu/frame/cuda_part.h"
#include "kernels/step/gpu/memory/repeated_call.h"

namespace kvstrata {

class CudaGraphs {
 public:
  // A batch whose layers were captured.
  struct Captured {
    std::vector<CudaPart> parts;
    std::vector<uint8_t> appended, attended;  // by layer
  };
  // The calls that such batches make outside of the engine's graphs.
  struct Called {
    std::vector<CudaPart> parts;
    std::vector<RepeatedCall> selects, attends;  // by layer
  };

  explicit CudaGraphs(int32_t layers) : layers_(static_cast<size_t>(layers)) {}

  // `generation` is the memory's current one.
  Captured& CaptureOf(uint64_t generation, const std::vector<CudaPart>& parts);
  Called& CallsOf(uint64_t generation, const std::vector<CudaPart>& parts);
  const std::vector<Captured>& captured(uint64_t generation);
  // How many repeated calls are graphs.
  int calls(uint64_t generation);

 private:
  static constexpr size_t kMostCalled = 8;  // batches

  void ForgetOlder(uint64_t generation);

  const size_t layers_;
  uint64_t generation_ = 0;
  std::vector<Captured> captured_;
  std::vector<Called> called_;
};

}  // namespace kvstrata
