// SPDX-License-Identifier: Apache-2.0
// Ops vote and pick in one pass over quantised keys: each KV head takes the `rule.take` tokens that
// its query heads vote for most (docs/spec/bits.md 3 and 4), and neither weights nor votes of all
// tokens are ever written.
//
// The selection is op pick's of op vote's votes (pick_cuda.h, vote_cuda.h; of their twins by
// score_bits, vote and top_k on a CPU), but for votes within 5e-3 of each other. Ties are for the
// lower index; the same input gives the same bits.
//
// SampleKernel reads some 8 to 16 thousand tokens a list and tells about what each head's sum of
// exponentials is, and a cut that about 3 * take tokens reach. FilterKernel reads all codes once,
// sums the exponentials, and keeps the tokens whose vote by the estimated sums reaches the cut.
// ChooseKernel, a cluster a list, has the exact sums, hence exact votes of what was kept, and
// proves that none that was left out is among the best: the vote of one is below cut * max over the
// heads of (estimated sum / exact sum). Where `take` votes do not reach that, AgainKernel, a
// cluster a list too, does both once more, by the exact sums and below a vote that `take` tokens
// are known to reach: slower than all CTAs of the device would be, but a list that needs nothing
// returns at once, and few need it. (Then it is not asked whether votes that are chosen reach 2^27
// times that one, beyond which they count as equal: sums would have been off by 19 nats. Where an
// estimate was off by 2^56, votes below 2^-38 * heads / take count as equal.) On SmolLM2's heads,
// at 2 to 10 % of the tokens, none to 7 of a thousand lists needed it (bench/notes/score_bits.md).
//
// Cost, bytes a layer: candidates * groups, and 36 (of groups above 4 heads 68) for each quad of
// tokens with one that was kept, written and read. No state between calls. Shapes as those of op
// vote over groups, lists of up to some 8 million tokens; compute capability 9.0 (clusters). Few
// lists, and short ones, take less time by ops vote and pick (kernels/plans/bits/gpu/cuda_bits.cc).
#pragma once

#include "kernels/ops/pick/pick_cuda.h"
#include "kernels/ops/vote/vote_cuda.h"

namespace kvstrata::cuda {

struct PickBitsBatch {
  // With groups and output_rows = kv_heads; votes are not used. scratch: PickBitsScratchBytes.
  VoteBatch vote;
  // Where the selection goes: units, lists, counts, sink_end, recent_begin, list_stride. The rest
  // is `vote`'s.
  PickBatch pick;
  float margin = 3;  // the sample's cut is for margin * take tokens. Tests choose.
};

// Depends on the shape (batch, query_heads, kv_heads, candidate_stride, the groups' format); 0 on a
// device that does not have the op, and for lists that are too long for it.
int64_t PickBitsScratchBytes(const PickBitsBatch& work);

// cudaErrorInvalidValue for a shape that it does not take.
int PickBitsCuda(const PickBitsBatch& work, Stream stream);

}  // namespace kvstrata::cuda
