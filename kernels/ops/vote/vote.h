// SPDX-License-Identifier: Apache-2.0
// Op vote: scores of every token for every query head, and their softmax votes
// (docs/spec/tokenselect.md 2, paper Eq. 7).
//
// ScoreTokens: out[i][t] = scale * q_i.k_t for the query heads of one KV head: each key is read
// once for all of them. Vote: votes[t] = sum over the heads of softmax_t(logits[h][t]), in two
// passes (maximum and sum, then votes), heads in order. Sums in fp32 (ref: double). Work items are
// independent. No allocation.
//
// With `always` the softmax is over these logits, too, which get no votes: a vote is a share of all
// attention. With `noise` the logits of the n scatter around the true ones, and a sum of
// exponentials is by exp(noise / 2) too large for it: it counts that much less
// (docs/spec/bits.md 3).
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

struct ScoreTokensWork {
  PagedRows rows;
  Run run;                   // positions
  const float* q = nullptr;  // [queries][dim]
  int32_t queries = 1;
  float scale = 1.0f;
  float* out = nullptr;  // query i, position run.begin + t: out[i * out_query + t]
  int64_t out_query = 0;
};

struct VoteWork {
  float* logits = nullptr;  // [heads][n], rows `stride` floats apart; overwritten
  int64_t stride = 0;
  int32_t heads = 0;
  int32_t n = 0;
  float* max = nullptr;           // scratch [heads]
  float* sum = nullptr;           // scratch [heads]
  float* votes = nullptr;         // [n], written
  const float* always = nullptr;  // [heads][always_n]
  int32_t always_n = 0;
  const float* noise = nullptr;  // [heads], variances; null: none

  // A head's sum of exp(logit - shift), of which `sum` is of the n.
  double WithAlways(int64_t head, double shift, double sum) const;
};

void ScoreTokensRef(const ScoreTokensWork* work, int64_t n, Executor& executor);
void ScoreTokensSimd(const ScoreTokensWork* work, int64_t n, Executor& executor);
// One vote at a time, split over heads, then over positions, by fixed tile sizes.
void VoteRef(const VoteWork& work, Executor& executor);
void VoteSimd(const VoteWork& work, Executor& executor);

}  // namespace kvstrata
