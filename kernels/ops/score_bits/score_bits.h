// SPDX-License-Identifier: Apache-2.0
// Op score_bits: logits of tokens whose keys are kept in few bits (docs/spec/bits.md 3).
//
//   out[i][t] = scale * sum over c of q_i[c] (minimum[c] + step[c] code_t[c])
//
// for the query heads of one KV head, over positions of sealed groups; it is to quantised keys what
// score_tokens (kernels/ops/vote) is to keys. Softmax and votes over what both wrote are op vote.
//
// Precision: ref sums in double. simd folds a group's steps into each query once a group, rounds
// q_i * step to 8 bits of its largest channel, multiplies in whole numbers, and keeps the rest in
// fp32: with B = 2^bits - 1 it is off by at most
//   scale * (B / 2) (1 / 254) * dim * max over c of |q_i[c] step[c]|      (1e-5 of the sums beside)
// Minimum and mean code are not rounded: codes count by their distance from B / 2, and not at all
// where every |q_i[c] step[c]| is below 1e-30. How the run is cut into work items does not change a
// bit.
//
// Work items are independent. Cost: reads each group once for every 4 queries. No allocation.
//
// BitsNoise: by how much such logits scatter around those of the keys (docs/spec/bits.md 3): the
// variance of a channel that is rounded to a multiple of `step` is step^2 / 12, and channels err by
// themselves. One implementation, in fp64. Cost: the steps of one group in eight.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"
#include "kernels/pages/quantised_group.h"

namespace kvstrata {

// The sealed groups of one (layer, KV head) of one sequence: group g holds the positions
// [g * format.tokens, (g + 1) * format.tokens).
struct QuantisedRows {
  QuantisedGroup format;               // REQUIRES: IsValid()
  std::byte* const* blocks = nullptr;  // index blocks in order of position
  int64_t offset = 0;                  // bytes from a block's start to its first group
  int32_t groups_per_block = 0;

  const std::byte* Group(int32_t g) const {
    return blocks[g / groups_per_block] + offset + (g % groups_per_block) * format.bytes();
  }
};

struct ScoreBitsWork {
  QuantisedRows rows;
  Run run;                   // positions; may begin and end inside a group
  const float* q = nullptr;  // [queries][dim]
  int32_t queries = 1;
  float scale = 1.0f;
  float* out = nullptr;  // query i, position run.begin + t: out[i * out_query + t]
  int64_t out_query = 0;
};

struct BitsNoiseWork {
  QuantisedRows rows;
  int32_t groups = 0;        // sealed ones; of none there is no noise
  const float* q = nullptr;  // [queries][dim]
  int32_t queries = 1;
  float scale = 1.0f;
  float* out = nullptr;  // [queries], variance of a logit
};

void BitsNoise(const BitsNoiseWork& work);
void ScoreBitsRef(const ScoreBitsWork* work, int64_t n, Executor& executor);
void ScoreBitsSimd(const ScoreBitsWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
