// SPDX-License-Identifier: Apache-2.0
// ScoreWorks: the work items of a selection that scores keys, by op, and the rotated queries that
// items share (compare attend_works.h).
//
// Ownership: rows and queries of items outlive Score. Threads: one call at a time. Cost: memory is
// kept from call to call.
#ifndef KVSTRATA_KERNELS_ROWS_SCORE_WORKS_H_
#define KVSTRATA_KERNELS_ROWS_SCORE_WORKS_H_

#include <cstdint>
#include <vector>

#include "kernels/backend/backend.h"

namespace kvstrata {

class ScoreWorks {
 public:
  void Clear();
  void Add(const ScoreTokensWork& work) { tokens_.push_back(work); }
  void Add(const ScorePlanesWork& work) { planes_.push_back(work); }
  // Its queries come rotated: work.q [work.queries][dim] by r [dim][dim]. Items that follow each
  // other with the same queries and rotation share them.
  void AddRotated(const ScorePackedWork& work, const float* r, int32_t dim);
  void Score(const Backend& backend, Executor& executor);

 private:
  std::vector<RotateWork> rotate_;
  std::vector<ScorePackedWork> packed_;
  std::vector<ScoreTokensWork> tokens_;
  std::vector<ScorePlanesWork> planes_;
  std::vector<float> rotated_;
  std::vector<size_t> rotate_out_, packed_q_;  // in rotated_, which moves while it grows
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_ROWS_SCORE_WORKS_H_
