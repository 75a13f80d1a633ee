// SPDX-License-Identifier: Apache-2.0
// Scores of an index's finest units for one layer, by KV head, and what selectors of units do with
// them. Private to selectors.
//
// A unit's score is the maximum over the heads of a group, or, with `softmax`, the sum over them of
// the softmax of its scaled scores among the candidates, so that no head wins by its norm alone
// (docs/spec/beyond.md 3).
// Threads: one call at a time for an object.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/select/selector.h"

namespace kvstrata {

class UnitScores {
 public:
  // Scores the complete units `units` of level 0; kind as the index has rows.
  void Score(const SelectContext& context, int layer, const float* q, ScoreWork::Kind kind,
             Run units, bool softmax);

  // [units of the last Score] of a KV head.
  const float* Of(int kv_head) const { return scores_.data() + int64_t{count_} * kv_head; }

 private:
  ScoreWork Work(const SelectContext& context, int layer, int head, ScoreWork::Kind kind) const;
  void ScoreGroups(const SelectContext& context, int layer, const float* q, ScoreWork::Kind kind,
                   Run units);
  void ScoreHeads(const SelectContext& context, int layer, const float* q, ScoreWork::Kind kind,
                  Run units);

  int32_t count_ = 0;
  std::vector<float> scores_;  // [kv_heads][count]
  std::vector<ScoreWork> works_;
  std::vector<float> q_, logits_, sums_;  // softmax alone
};

// Sums of the heads' softmax over n units: logits [heads][n] from `stride` floats apart, votes [n].
// Logits and `scratch` are overwritten.
void SumSoftmax(const Backend& backend, Executor& executor, float* logits, int64_t stride,
                int32_t heads, int32_t n, float* votes, std::vector<float>* scratch);

// The rest: units of `candidates` that are not in `chosen` (ascending), as runs of `level`.
void AppendRest(Run candidates, const std::vector<int32_t>& chosen, int32_t level,
                std::vector<CoarseRun>* rest);

}  // namespace kvstrata
