// SPDX-License-Identifier: Apache-2.0
// ShadowAttention: what a plan loses on one decode token, measured beside the step that runs it.
//
// For every layer and query head, from full attention over the sequence's raw pages:
//   recall  softmax mass of full attention on the positions that the plan attended one by one, in
//           whatever form it holds them (docs/spec/README.md, "mass recall"). Units that it
//           attended as one coarse row do not count. 0 .. 1.
//   error   ||plan - full|| / ||full|| of the head's output, both fp32 and before rounding to the
//           engine's dtype: selection and codec together. 0 when both are zero; what is not finite
//           is the largest float.
// Full attention is a Step of plan `full` of its own, so a plan that attends everything raw has
// recall 1 and error 0 exactly.
//
// Ownership: borrows the member's pages, the backend and the executor. Threads: the Step's.
// Cost: a full attention and one over the attended positions per layer; memory for 2 floats per
// layer and query head.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/step/step.h"

namespace kvstrata {

// What was measured of one decode token.
struct ShadowSample {
  bool raw_gone = false;             // some raw page of the sequence was released: nothing was
  std::vector<int32_t> layers;       // measured ones, ascending
  std::vector<float> recall, error;  // [layers][query_heads]
};

// What ShadowAttention and CudaShadow (cuda_shadow.h) have in common.
bool IsRawGone(const StepMember& member);
// The attended positions' part of full attention's mass. A NaN among the inputs is no recall.
float MassOf(float attended_lse, float full_lse);
// The error of one head's output.
float OutputError(const float* out, const float* full, int32_t dim);

class ShadowAttention {
 public:
  // REQUIRES: one new token.
  ShadowAttention(const StepMember& member, const Backend& backend, Executor& executor);

  bool raw_gone() const { return sample_.raw_gone; }

  // The plan answered `out` [query_heads][head_dim] to `q` (the same shape, fp32, heads side by
  // side) over `attended`: 1, kv_heads or query_heads lists of positions. The layer's keys and
  // values are in the pages. A layer that is measured again replaces what was found before.
  void Measure(int layer, const float* q, const float* out,
               const std::vector<std::vector<Run>>& attended);

  const ShadowSample& sample() const { return sample_; }
  const std::vector<int32_t>& layers() const { return sample_.layers; }
  const std::vector<float>& recall() const { return sample_.recall; }
  const std::vector<float>& error() const { return sample_.error; }

 private:
  // Raw attention over `selection`: outputs to out_, lse to `lse`.
  void Attend(int layer, const float* q, const Selection* selection, std::vector<float>* lse);
  size_t RowOf(int layer);

  SequenceState state_;  // under plan `full`, over the member's tokens
  ShadowSample sample_;
  Step step_;
  std::vector<float> out_, full_lse_, attended_lse_;
};

}  // namespace kvstrata
