// SPDX-License-Identifier: Apache-2.0
// CudaShadow: what ShadowAttention measures (shadow_attention.h says what that is), of a decode
// token whose CudaStep runs on a GPU: behind each layer's attention the step attends once more, in
// full and over what the plan chose, on the same pages and with the same kernels.
//
// With codec raw everything is enqueued and nothing waits: the plan's own log-sum-exp is that of
// the attended positions. With the other codecs it is not, so their positions are read back first,
// and a layer's Attend waits for the GPU. What cannot be had (memory, an error) loses the sample,
// never the step. Layers that the engine captures, or replays, cannot be measured: a graph of its
// own would hold the measuring for ever.
//
// Ownership: borrows the table of ops; outlives the step on the GPU. Threads: the step's; Read once
// the GPU is done with the step. Cost: a full attention and one or two over what the plan attended
// per layer; 8 bytes a layer, query head and channel on the GPU, and as much of page-locked memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/pages/page_view.h"
#include "kernels/step/shadow_attention.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

class CudaStep;  // cuda_step.h

class CudaShadow {
 public:
  // For sequences of one geometry. GPU_MEMORY, CUDA_ERROR.
  static Result<std::unique_ptr<CudaShadow>> Make(const cuda::CudaOps& ops,
                                                  const Geometry& geometry);
  CudaShadow(const CudaShadow&) = delete;
  CudaShadow& operator=(const CudaShadow&) = delete;
  // REQUIRES: the GPU is done with the step.
  ~CudaShadow() = default;

  // Whether the last step captured a layer in a graph, or replayed one from it.
  bool captured() const { return captured_; }
  // Whether something failed in the last step.
  bool lost() const { return lost_; }
  // REQUIRES: neither.
  ShadowSample Read() const;

  // --- the step's
  // A new step begins.
  void Restart(bool raw_gone);
  // What the layer's attention of a member loses. No error of it is the step's.
  void Measure(CudaStep* step, int member, int layer, const Rows& q);
  // A layer was captured, or replayed.
  void NoteCaptured() { captured_ = true; }
  // Enqueues the copy that Read reads.
  void CopyOut(cuda::Stream stream);

 private:
  // Which rows of a layer: the plan's outputs and full attention's; then their log-sum-exps.
  enum class Of { kPlan, kFull };

  CudaShadow(const cuda::CudaOps& ops, const Geometry& geometry) : ops_(ops), geometry_(geometry) {}

  Status AttendAgain(CudaStep* step, int member, int layer, const Rows& q);
  Status AttendPositions(CudaStep* step, int member, int layer, const Rows& q);
  Result<const void*> HeadOfGroups(const CudaStep& step, const Rows& q, int32_t row, int head);

  int64_t RowFloats() const { return int64_t{geometry_.query_heads} * geometry_.head_dim; }
  int64_t Floats() const {
    return int64_t{2} * geometry_.layers * (RowFloats() + geometry_.query_heads);
  }
  int64_t OutputAt(int layer, Of of) const {
    return (int64_t{2} * layer + static_cast<int>(of)) * RowFloats();
  }
  int64_t LseAt(int layer, Of of) const {
    return int64_t{2} * geometry_.layers * RowFloats() +
           (int64_t{2} * layer + static_cast<int>(of)) * geometry_.query_heads;
  }

  const cuda::CudaOps& ops_;
  const Geometry geometry_;
  DeviceBuffer results_;     // float [Floats()]
  PageLockedBuffer copied_;  // the same, copied when the step ends
  // For codecs other than raw: positions of a layer as lists of tokens, and queries of one head of
  // each group.
  DeviceBuffer lists_, queries_;
  std::vector<uint8_t> measured_;  // by layer
  // By layer: log-sum-exps of the positions stand by [head of the group][KV head].
  std::vector<uint8_t> by_group_;
  bool raw_gone_ = false, captured_ = false, lost_ = false;
};

}  // namespace kvstrata
