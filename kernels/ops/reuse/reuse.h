// SPDX-License-Identifier: Apache-2.0
// Op reuse: whether the selection that an earlier step made serves this step's query (selector
// vote, docs/spec/tokenselect.md 3), decided without the host. On a GPU it is the beginning of op
// vote (reuse.cuh), whose CTAs all come to the same answer: on a hit they return, as does op pick
// behind them. One captured graph serves hits and misses.
//
// A cache belongs to a sequence and holds two picks a layer: the last one that counts, and room for
// the next. A pick counts in steps of more tokens than its own, so that of a step that was given up
// does not: the next step has as many tokens, and replaces or clears it. Zeroed memory holds no
// pick.
//
// A hit: the cosine of the query (all heads, or each head) to the pick's is at least theta. Sums of
// 8 products in fp32 (ref: double), those in double: where the cosine is within 1e-6 of theta
// another implementation (kernels/plans/tokenselect/vote.cc) may answer otherwise. A zero query has
// cosine 0. theta >= 1: never. Sequences attended in full are left alone.
#pragma once

#include "kernels/cuda/batches/candidates.h"
#include "kernels/cuda/batches/device_rows.h"

namespace kvstrata::cuda {

// Where things lie in a cache: [layers][2 picks] of { int32_t tokens (of the step that made it,
// 0: none); float query[query_heads * head_dim] at 16; int32_t list[take] }.
struct PickCacheLayout {
  int64_t query_floats = 0;  // a multiple of 8
  int32_t take = 0;

  KVS_HOST_DEVICE int64_t query_at() const { return 16; }
  KVS_HOST_DEVICE int64_t list_at() const { return query_at() + query_floats * 4; }
  KVS_HOST_DEVICE int64_t pick_bytes() const {
    return list_at() + (int64_t{take} * 4 + 15) / 16 * 16;
  }
  KVS_HOST_DEVICE int64_t layer_bytes() const { return 2 * pick_bytes(); }
};

// Belongs to a VoteBatch over single tokens, whose rule and queries it shares.
struct Reuse {
  const uint64_t* caches = nullptr;  // device [batch], addresses; 0 where attended in full
  int32_t layer = 0;
  double theta = 0;                 // least cosine
  bool per_head = false;            // every head's cosine by itself
  bool append_departed = false;     // the recent window goes on from where it began in the pick
  const int32_t* tokens = nullptr;  // device [batch]
  bool ahead = false;               // launch.cuh; of tokens and caches
  // Written, device [batch]. voting: kNoQuery on a hit, else `tokens`: what pick takes as tokens.
  // lists: the list to attend, or to be written (PickBatch::lists).
  int32_t* voting = nullptr;
  uint64_t* lists = nullptr;
  // On a hit: the rest of the selection (PickBatch).
  int32_t* counts = nullptr;
  int32_t* sink_end = nullptr;
  int32_t* recent_begin = nullptr;
};

// The queries of a batch: [batch][heads][head_dim].
struct ReuseQueries {
  const void* q = nullptr;
  DType dtype = DType::kBF16;
  int32_t batch = 0, heads = 0, head_dim = 0;
};

// The truth; all of the memory, caches included, is the host's.
void ReuseRef(const Reuse& work, const CandidateRule& rule, const ReuseQueries& queries);

}  // namespace kvstrata::cuda
