// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/score_works.h"

namespace kvstrata {

void ScoreWorks::Clear() {
  tokens_.clear();
  planes_.clear();
  codec_.Clear();
}

void ScoreWorks::Score(const Backend& backend, Executor& executor) {
  const auto run = [&executor](const auto& works, auto op) {
    if (!works.empty()) op(works.data(), static_cast<int64_t>(works.size()), executor);
  };
  codec_.Run(backend, executor);
  run(tokens_, backend.score_tokens);
  run(planes_, ScorePlanes);
}

}  // namespace kvstrata
