// SPDX-License-Identifier: Apache-2.0
// BlockLists: scores of a step's candidates, and the lists that op pick makes of them; of selectors
// over an engine's own blocks. As BlockSelector.
#pragma once

#include <cstdint>

#include "kernels/blocks/block_selector.h"

namespace kvstrata {

class BlockLists {
 public:
  // `groups` lists a sequence. run: op vote is to be called, and votes for so many candidates
  // together; 0: it is not.
  BlockLists(const BlockSelectorSource& source, const cuda::CandidateRule& rule, int32_t groups,
             int32_t run);

  const cuda::CandidateRule& rule() const { return rule_; }
  int32_t stride() const { return stride_; }  // units that a list has room for
  float* ScoresIn(const BlockWorkspace& workspace) const { return workspace.At(scores_); }

  // The heads' votes: rows, or groups, and how they are read are `vote`'s.
  Status Vote(const BlockCall& call, cuda::VoteBatch vote) const;
  // The best of the scores.
  Status Pick(const BlockCall& call) const;
  cuda::DeviceSelection SelectionOf(const BlockWorkspace& workspace) const;

 private:
  const cuda::CudaOps& ops_;
  const Geometry geometry_;
  const cuda::CandidateRule rule_;
  const int32_t rows_, groups_, run_, stride_;
  BlockWorkspace::Piece<float> scores_;
  BlockWorkspace::Piece<int32_t> units_, counts_, sink_end_, recent_begin_;
  BlockWorkspace::Piece<std::byte> vote_scratch_, pick_scratch_;
};

}  // namespace kvstrata
