// SPDX-License-Identifier: Apache-2.0
// Op vote on the GPU: what the heads' softmax over the candidates gives each of them (vote.h,
// docs/spec/tokenselect.md 2; over units, docs/spec/beyond.md 3).
//
//   votes[b][o][u - first] = sum over the query heads h of output o of
//                            softmax over u in [first, last) of (scale * score(h, u))
// with output_rows 1 all heads vote for one list (TokenSelect), with kv_heads each group for its
// own (minmax). score: q . row with fields 1, Quest's bound or mean and deviation with fields 2
// (score_cuda.h). A head
// without any score above -inf votes for nothing. Sequences attended in full are left out.
//
// With `groups` the candidates are tokens, scored by their quantised keys (docs/spec/bits.md 3):
// score = q . k~ as op score_bits has it (score_bits_cuda.h). All of them are in groups that were
// sealed before the step: rule.recent_tokens >= tokens of a group, which are a multiple of 32.
// Votes are of the rule's units: with unit_tokens 4, 8 or 16 sums over runs of so many tokens,
//   votes[b][o][u - first] = sum over the tokens of unit u, rows candidate_stride / unit_tokens
//   apart
//
// With `always` a vote is a share of all attention: the softmax is over what is always attended,
// too, and the sum over the candidates counts as op always says (always.h).
//
// Two kernels. The first reads each row once for its group and keeps, for each head and candidate,
// exp(score - the maximum of its block of 64 candidates) as fp16 times 2^15: 2 bytes with a
// relative error of 2^-12 down to e^-20 below the block's maximum, and the second needs no
// exponential. (A bf16 score of 20 would be off by 0.04, its vote by 4 %; an fp32 one takes twice
// the bytes. Of a run it keeps the sum, times 2^11.) Sums in fp32 in a fixed order: the same input
// gives the same bits. Relative error <= 5e-3. Rows bf16 or fp16, head_dim 64, 128 or 256, 1 to 8
// queries a KV head, all finite. Cost, bytes a layer: candidates * (rows, or groups, + 4 *
// query_heads / run) + the votes.
#pragma once

#include "kernels/cuda/batches/candidates.h"
#include "kernels/cuda/batches/device_rows.h"
#include "kernels/ops/quantise_keys/device_groups.h"
#include "kernels/ops/reuse/reuse.h"

namespace kvstrata::cuda {

struct VoteBatch {
  DeviceRows rows;  // the keys (KeyRows), or summaries as in ScoreBatch
  int32_t fields = 1;
  int64_t field_stride = 0;
  bool deviation = false;
  DeviceGroups groups;  // with a format in place of rows
  bool ahead = false;   // with groups alone, launch.cuh: of tokens and groups
  float scale = 1.0f;   // > 0
  CandidateRule rule;
  const int32_t* tokens = nullptr;  // device [batch]
  const void* q = nullptr;          // device [batch][query_heads][head_dim]
  DType q_dtype = DType::kBF16;
  int64_t q_stride = 0;  // elements from a sequence to the next, 0: query_heads * head_dim
  int32_t batch = 0, query_heads = 0;
  int32_t output_rows = 1;        // 1 or kv_heads
  const float* always = nullptr;  // device [batch][query_heads][kAlwaysFloats], or null
  float* votes = nullptr;         // device [batch][output_rows][candidate_stride]
  int32_t candidate_stride = 0;   // candidates, of groups in tokens, that a sequence may have
  void* scratch = nullptr;        // device, VoteScratchBytes, 16-byte aligned; any contents
  // With caches: whether votes are counted is decided first, and `tokens` is reuse.voting, written.
  // Not with groups.
  Reuse reuse;

  KVS_HOST_DEVICE constexpr bool of_groups() const { return groups.format.dim > 0; }
  constexpr int32_t kv_heads() const { return of_groups() ? groups.kv_heads : rows.kv_heads; }
  KVS_HOST_DEVICE constexpr int32_t head_dim() const {
    return of_groups() ? groups.format.dim : rows.head_dim;
  }
  // Elements from q to the queries of a sequence.
  KVS_HOST_DEVICE constexpr int64_t QueriesAt(int64_t sequence) const {
    return sequence * (q_stride != 0 ? q_stride : int64_t{query_heads} * head_dim());
  }
};

// Depends on the shape alone (batch, query_heads, kv_heads, candidate_stride).
int64_t VoteScratchBytes(const VoteBatch& work);

// cudaErrorInvalidValue for a shape that it does not take.
int VoteCuda(const VoteBatch& work, Stream stream);

}  // namespace kvstrata::cuda
