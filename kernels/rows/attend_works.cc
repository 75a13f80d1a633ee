// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/attend_works.h"

namespace kvstrata {

void AttendWorks::Clear() {
  runs_.clear();
  spans_.clear();
  rotated_.clear();
  rotate_.clear();
  attend_.clear();
  packed_.clear();
  lowrank_.clear();
  coarse_.clear();
  planes_.Clear();
  merge_.clear();
  attend_run_.clear();
  coarse_run_.clear();
  lowrank_span_.clear();
  packed_q_.clear();
  rotate_out_.clear();
}

void AttendWorks::Add(const AttendWork& work) {
  attend_.push_back(work);
  attend_run_.push_back(kElsewhere);
}

void AttendWorks::Add(AttendWork work, size_t first_run) {
  work.run_count = static_cast<int32_t>(runs_.size() - first_run);
  attend_.push_back(work);
  attend_run_.push_back(first_run);
}

void AttendWorks::Add(AttendCoarseWork work, size_t first_run) {
  work.run_count = static_cast<int32_t>(runs_.size() - first_run);
  coarse_.push_back(work);
  coarse_run_.push_back(first_run);
}

void AttendWorks::Add(AttendLowRankWork work, size_t first_span) {
  work.span_count = static_cast<int32_t>(spans_.size() - first_span);
  lowrank_.push_back(work);
  lowrank_span_.push_back(first_span);
}

size_t AttendWorks::RotatedAt(const float* r, const QueryTile& tile) {
  const float* const last = tile.q + (tile.queries - 1) * tile.q_token;
  if (!rotate_.empty() && rotate_.back().r == r && rotate_.back().x == last) {
    return packed_q_.back();
  }
  const size_t at = rotated_.size();
  const auto token = static_cast<size_t>(int64_t{tile.group} * tile.dim);
  rotated_.resize(at + static_cast<size_t>(tile.queries) * token);
  for (int32_t i = 0; i < tile.queries; ++i) {
    RotateWork w;
    w.r = r;
    w.dim = tile.dim;
    w.x = tile.q + i * tile.q_token;
    w.x_row = tile.dim;
    w.rows = tile.group;
    rotate_.push_back(w);
    rotate_out_.push_back(at + static_cast<size_t>(i) * token);
  }
  return at;
}

void AttendWorks::AddRotated(AttendPackedWork work, const float* r, const QueryTile& tile) {
  packed_q_.push_back(RotatedAt(r, tile));
  work.q_token = int64_t{tile.group} * tile.dim;
  packed_.push_back(work);
}

void AttendWorks::Resolve() {
  for (size_t i = 0; i < attend_.size(); ++i) {
    if (attend_run_[i] != kElsewhere) attend_[i].runs = runs_.data() + attend_run_[i];
  }
  for (size_t i = 0; i < coarse_.size(); ++i) coarse_[i].runs = runs_.data() + coarse_run_[i];
  for (size_t i = 0; i < lowrank_.size(); ++i) lowrank_[i].spans = spans_.data() + lowrank_span_[i];
  for (size_t i = 0; i < packed_.size(); ++i) packed_[i].q = rotated_.data() + packed_q_[i];
  for (size_t i = 0; i < rotate_.size(); ++i) rotate_[i].out = rotated_.data() + rotate_out_[i];
}

void AttendWorks::Attend(const Backend& backend, Executor& executor) {
  Resolve();
  const auto run = [&executor](const auto& works, auto op) {
    if (!works.empty()) op(works.data(), static_cast<int64_t>(works.size()), executor);
  };
  run(rotate_, backend.rotate);
  run(attend_, backend.attend_raw);
  planes_.Attend(backend, executor);
  run(packed_, backend.attend_packed);
  run(lowrank_, backend.attend_lowrank);
  run(coarse_, backend.attend_coarse);
  run(merge_, backend.merge);
}

}  // namespace kvstrata
