// SPDX-License-Identifier: Apache-2.0
// StepBatch: the members of a step and where their new tokens lie in its tensors; what Step (CPU)
// and CudaStep (cuda_step.h) have in common.
//
// Batches are packed and ragged: q, k, v hold the new tokens of member 0, then of member 1, ...
// Members may have different plans but share one geometry.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/step/sequence_state.h"

namespace kvstrata {

// Rows of a packed batch: [tokens][heads][head_dim], head_dim contiguous.
struct Rows {
  const std::byte* data = nullptr;
  int64_t token_stride = 0;  // bytes
  int64_t head_stride = 0;   // bytes
  DType dtype = DType::kF32;
};
struct MutableRows {
  std::byte* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  DType dtype = DType::kF32;
};

struct StepMember {
  SequenceState* state = nullptr;
  SequenceView view;            // view.tokens == state->tokens(); pages cover tokens + new_tokens
  int32_t new_tokens = 0;       // >= 1
  bool kept = true;             // else padding: its rows are computed, and the state stays as it is
  int32_t not_finite_word = 0;  // on a GPU: which of the workspace's (CudaWorkspace)
};

// What attending one layer read for one member, over all heads (step_cost.h); rows are (position,
// KV head) pairs.
struct StepCost {
  uint64_t rows = 0;          // at full resolution, in whatever form
  uint64_t coarse_rows = 0;   // units as one row, or rows by some of their bits
  uint64_t attend_bytes = 0;  // bytes of both
  uint64_t select_bytes = 0;  // summaries and keys that the selection read
  uint64_t hot_bytes = 0;     // in attend_bytes: by a GPU's copies of rows on the host
};

// Ascending runs of the positions that a group attends one by one, whatever form holds them;
// stored: of the sequence, or null.
std::vector<Run> PositionsOf(const Selection& selection, const StoredRows* stored, int group);

class StepBatch {
 public:
  // REQUIRES: members not empty, at least one new token each, one geometry.
  explicit StepBatch(std::vector<StepMember> members);
  StepBatch(const StepBatch&) = delete;
  StepBatch& operator=(const StepBatch&) = delete;

  int members() const { return static_cast<int>(members_.size()); }
  const StepMember& member(int i) const { return members_[i]; }
  int32_t tokens() const { return tokens_; }  // sum of new tokens
  // One new token behind a complete prompt.
  bool Decodes(int member) const;

 protected:
  ~StepBatch() = default;

  const Geometry& geometry() const { return members_[0].state->geometry(); }

  std::vector<StepMember> members_;
  std::vector<int32_t> first_row_;  // where each member begins in the packed batch
  int32_t tokens_ = 0;
};

}  // namespace kvstrata
