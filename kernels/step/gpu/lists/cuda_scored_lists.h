// SPDX-License-Identifier: Apache-2.0
// CudaScoredLists: a list of units for each member and KV head, the best by scores that an op
// wrote: the room for scores and lists, op vote for KV heads by themselves, and op pick. Private to
// selectors on a GPU (minmax, bits).
#pragma once

#include <cstdint>

#include "kernels/cuda/batches/candidates.h"
#include "kernels/step/gpu/lists/cuda_lists.h"

namespace kvstrata {

class CudaScoredLists {
 public:
  // What a (member, KV head) needs: candidates, and chosen ones.
  struct Room {
    int32_t units = 0, list = 0;
    bool operator==(const Room&) const = default;
  };

  // Room for `need` of each member. Units grow by multiples of `multiple`, so that graphs serve
  // many steps.
  Status Fit(const CudaFrame& frame, const Room& need, int32_t multiple);
  int32_t units() const { return room_.units; }
  const CudaLists& lists() const { return lists_; }

  // Scores of a part's members: float [members][kv_heads][units()].
  float* ScoresOf(const CudaFrame& frame, const CudaPart& part) const;
  // Writes them by op vote. vote: what is scored; the rest is filled in.
  Status Vote(const CudaFrame& frame, const CudaPart& part, const cuda::CandidateRule& rule,
              const Rows& q, cuda::VoteBatch vote) const;
  // Makes lists of them by op pick: of rule.take units each. run: candidates of a unit that was
  // voted for (VoteBatch);
  Status Pick(const CudaFrame& frame, const CudaPart& part, const cuda::CandidateRule& rule,
              int32_t run = 1) const;
  // or of as many as leave out votes of at most `missed`, by op take, and at most `most`.
  Status PickMost(const CudaFrame& frame, const CudaPart& part, const cuda::CandidateRule& rule,
                  int32_t run, double missed, int32_t most) const;

 private:
  Status FitTo(const CudaFrame& frame, int32_t members, const Room& room);
  cuda::PickBatch PickOf(const CudaFrame& frame, const CudaPart& part,
                         const cuda::CandidateRule& rule, int32_t run) const;

  int32_t members_ = 0;
  Room room_;
  CudaLists lists_;
  DeviceBuffer scores_, vote_scratch_, pick_scratch_, takes_;
};

}  // namespace kvstrata
