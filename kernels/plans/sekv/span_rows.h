// SPDX-License-Identifier: Apache-2.0
// What selectors over codec `lowrank` share: the rows that stay raw as runs, and products of
// queries with the spans' mean keys. Private to sekv.
//
// Threads: one call at a time for an object.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/plans/sekv/lowrank.h"
#include "kernels/select/selector.h"

namespace kvstrata {

// The raw rows of all parts, as runs; made anew when the table's version changes.
class RawRuns {
 public:
  // Writes them and everything from the spans' end on: runs of a step over n tokens.
  void Append(const SelectContext& context, int32_t n, std::vector<Run>* runs);

 private:
  const SpanStorage* spans_ = nullptr;
  uint64_t version_ = 0;
  std::vector<Run> runs_;
};

// Dot products of q [queries][head_dim] with the mean keys of all spans of one (layer, KV head):
// out + i * spans + span. Reads each mean once.
void ScoreSpans(const SelectContext& context, int layer, int kv_head, const float* q,
                int32_t queries, float* out);

// Why a complete prompt has no spans, for the status.
std::string WhyNoSpans(const Plan& plan, const SelectContext& context);

}  // namespace kvstrata
