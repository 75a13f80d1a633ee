// SPDX-License-Identifier: Apache-2.0
// ScoreWorks: the work items of a selection that scores keys, by op (compare attend_works.h).
//
// Ownership: rows and queries of items outlive Score. Threads: one call at a time. Cost: memory is
// kept from call to call.
#pragma once

#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/rows/codec_works.h"

namespace kvstrata {

class ScoreWorks {
 public:
  void Clear();
  void Add(const ScoreTokensWork& work) { tokens_.push_back(work); }
  void Add(const ScorePlanesWork& work) { planes_.push_back(work); }
  // Items of ops that a codec alone has.
  template <typename Works>
  Works& Of() {
    return codec_.Of<Works>();
  }
  void Score(const Backend& backend, Executor& executor);

 private:
  std::vector<ScoreTokensWork> tokens_;
  std::vector<ScorePlanesWork> planes_;
  CodecWorkList codec_;
};

}  // namespace kvstrata
