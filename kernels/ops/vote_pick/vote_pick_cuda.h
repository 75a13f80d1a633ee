// Ops vote and pick in one, over quantised keys: each KV head takes the tokens that its query heads
// vote for most, and the votes themselves are never written.
//
// The selection is bit for bit what op pick makes of op vote's votes (vote_cuda.h, pick_cuda.h).
//
// Three kernels. The first is op vote's: weights of each head and candidate. The second sums them
// to votes, counts these in a histogram of 16 bins an octave, and keeps the largest of each block
// of 64 candidates. No token is chosen whose vote lies below the bin that holds the last one that
// is: so the third, several CTAs a list, sums the weights of those blocks alone again that have a
// larger vote, and picks among what is left. Where very many votes are alike it holds too few of
// them and sums them again for each digit: slower, the same selection.
//
// Cost, bytes a layer: candidates * (groups + 4 * query_heads), and of the blocks with a chosen
// token 2 * query_heads a candidate.
#ifndef KVSTRATA_KERNELS_OPS_VOTE_PICK_VOTE_PICK_CUDA_H_
#define KVSTRATA_KERNELS_OPS_VOTE_PICK_VOTE_PICK_CUDA_H_

#include "kernels/ops/pick/pick_cuda.h"
#include "kernels/ops/vote/vote_cuda.h"

namespace kvstrata::cuda {

struct VotePickBatch {
  // With groups and output_rows = kv_heads; votes are not used. scratch: VotePickScratchBytes.
  VoteBatch vote;
  // Where the selection goes, list_stride and scratch_lists; the rest is `vote`'s. scratch:
  // VotePickExchangeBytes, all zero before the first call; every call leaves what the next needs.
  PickBatch pick;
};

// Depend on the shape and on the current device.
int64_t VotePickScratchBytes(const VotePickBatch& work);
int64_t VotePickExchangeBytes(const VotePickBatch& work);

// cudaErrorInvalidValue for a shape that op vote does not take.
int VotePickCuda(const VotePickBatch& work, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_VOTE_PICK_VOTE_PICK_CUDA_H_
