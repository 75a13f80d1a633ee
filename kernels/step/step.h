// SPDX-License-Identifier: Apache-2.0
// A step: one forward pass over a batch of sequences (docs/design.md, "Two transports, one step").
// Both transports run this code, the client library on mapped pages and the daemon for remote
// callers, so both give the same bits.
//
//   begin (constructor) -> per layer Append, [Select,] Attend -> End
//
// It appends, asks the plans' selectors and commits; what the layer then attends is cut by
// StepTiles (step_tiles.h) and computed by StepWorks (step_works.h).
//
// Threads: one call at a time for a Step and for the states in it; different Steps are independent.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/step/dense_rows.h"
#include "kernels/step/step_batch.h"
#include "kernels/step/step_tiles.h"
#include "kernels/step/step_works.h"

namespace kvstrata {

class ShadowAttention;  // shadow_attention.h

class Step : public StepBatch {
 public:
  // Catches every member up: its index, for all layers, and its selector.
  // REQUIRES: as StepBatch; states and views outlive the Step.
  Step(std::vector<StepMember> members, const Backend& backend, Executor& executor);
  ~Step();

  // k, v [sum of new tokens][kv_heads][head_dim]. TENSOR_NOT_FINITE (finite_rows.h): the layer has
  // no rows then, and needs another Append.
  Status Append(int layer, const Rows& k, const Rows& v);

  // Fixes the selection of `layer` from q [sum of new tokens][query_heads][head_dim].
  // REQUIRES: the layer was appended (a prompt chunk selects from the tokens before it).
  void Select(int layer, const Rows& q);
  // Fixes it to `selection`, of a Step that has one member and no prompt to cut.
  void Choose(int layer, Selection selection);

  // Attention of the new tokens over what Select chose (it selects first if Select was not called
  // for this layer): the history as selected for the first new token, the new tokens causally. A
  // prompt is cut at multiples of vote.chunk, each chunk with a selection of its own, where the
  // selector selects in prefill (ADR 3).
  // Models with keys stored before rotary embedding pass q before it as well, everywhere; a token's
  // rows and its query stand at their positions, or, with plan.compact, at their ranks among the
  // rows that it attends: h rows of history at 0 .. h - 1, new token i and its query at h + i.
  // out like q; lse (may be null) [sum of new tokens][query_heads], natural log of the sum of exp
  // of the scaled scores.
  void Attend(int layer, const Rows& q, const MutableRows& out, float* lse);

  // Measures from now on what each Attend of `member` loses (shadow_attention.h); answers stay the
  // same bits. REQUIRES: Decodes(member), before its first Attend.
  void Shadow(int member);
  // Null: Shadow was not called for it.
  const ShadowAttention* shadow(int member) const;

  // All layers hold the new tokens: the states advance. The Step is over. A Step that is destroyed
  // without End leaves its states as they were.
  void End();

  // The selection of the last layer selected or attended; of a member's last chunk.
  const Selection& selection(int member) const { return chunks_[last_chunk_[member]].selection; }
  int Groups(int member) const { return GroupsOf(selection(member)); }
  std::vector<Run> Positions(int member, int group) const {
    return PositionsOf(selection(member), members_[member].state->stored(), group);
  }
  std::span<const int32_t> Units(int member, int group) const {
    return UnitsOf(selection(member), group);
  }
  // The cost of the last layer attended.
  const StepCost& cost(int member) const { return cost_[member]; }

 private:
  void SelectChunk(int layer, const Rows& q, StepChunk* chunk);
  void CountCosts(int layer);
  void MeasureShadows(const LayerTensors& t);

  std::vector<StepChunk> chunks_;
  std::vector<int> last_chunk_;                            // by member
  std::vector<StepCost> cost_;                             // by member
  std::vector<ReadCost> reads_;                            // by member, of the layer attended
  std::vector<std::unique_ptr<ShadowAttention>> shadows_;  // by member; empty: there are none
  int selected_layer_ = -1;
  const Backend& backend_;
  Executor& executor_;
  DenseQueries queries_;
  DenseOutputs outputs_;
  StepTiles tiles_;
  StepWorks works_;
};

}  // namespace kvstrata
