// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/score_works.h"

namespace kvstrata {

void ScoreWorks::Clear() {
  rotate_.clear();
  packed_.clear();
  tokens_.clear();
  planes_.clear();
  rotated_.clear();
  rotate_out_.clear();
  packed_q_.clear();
}

void ScoreWorks::AddRotated(const ScorePackedWork& work, const float* r, int32_t dim) {
  packed_.push_back(work);
  if (!rotate_.empty() && rotate_.back().r == r && rotate_.back().x == work.q) {
    packed_q_.push_back(packed_q_.back());
    return;
  }
  RotateWork& w = rotate_.emplace_back();
  w.r = r;
  w.dim = dim;
  w.x = work.q;
  w.x_row = dim;
  w.rows = work.queries;
  packed_q_.push_back(rotated_.size());
  rotate_out_.push_back(rotated_.size());
  rotated_.resize(rotated_.size() + static_cast<size_t>(int64_t{work.queries} * dim));
}

void ScoreWorks::Score(const Backend& backend, Executor& executor) {
  for (size_t i = 0; i < rotate_.size(); ++i) rotate_[i].out = rotated_.data() + rotate_out_[i];
  for (size_t i = 0; i < packed_.size(); ++i) packed_[i].q = rotated_.data() + packed_q_[i];
  const auto run = [&executor](const auto& works, auto op) {
    if (!works.empty()) op(works.data(), static_cast<int64_t>(works.size()), executor);
  };
  run(rotate_, backend.rotate);
  run(packed_, backend.score_packed);
  run(tokens_, backend.score_tokens);
  run(planes_, ScorePlanes);
}

}  // namespace kvstrata
