// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/attend_works.h"

#include <algorithm>
#include <cmath>
#include <limits>

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
  planes_.clear();
  planes_place_.clear();
  upper_.clear();
  lower_.clear();
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

void AttendWorks::Add(AttendPlanesWork work, size_t first_group, const QueryTile& tile) {
  work.rows.groups = static_cast<int32_t>(upper_.size() - first_group);
  PlanesPlace place = {first_group, 0, 0, tile.pages, tile.read};
  if (!planes_.empty()) {
    const AttendPlanesWork& last = planes_.back();
    place.first_flag = planes_place_.back().first_flag +
                       static_cast<size_t>(last.rows.tokens() + last.rows.strips());
    place.first_raw = planes_place_.back().first_raw + 2 * static_cast<size_t>(last.group);
  }
  planes_.push_back(work);
  planes_place_.push_back(place);
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
  ResolvePlanes();
  for (size_t i = 0; i < rotate_.size(); ++i) rotate_[i].out = rotated_.data() + rotate_out_[i];
}

void AttendWorks::ResolvePlanes() {
  if (planes_.empty()) return;
  const AttendPlanesWork& last = planes_.back();
  const PlanesPlace& place = planes_place_.back();
  flags_.resize(place.first_flag + static_cast<size_t>(last.rows.tokens() + last.rows.strips()));
  raw_.resize(place.first_raw + 2 * static_cast<size_t>(last.group));
  for (size_t i = 0; i < planes_.size(); ++i) {
    AttendPlanesWork& w = planes_[i];
    const PlanesPlace& own = planes_place_[i];
    w.rows.upper = upper_.data() + own.first_group;
    w.rows.lower = lower_.data() + own.first_group;
    w.fine = flags_.data() + own.first_flag;
    w.strips = w.fine + w.rows.tokens();
    w.raw_m = raw_.data() + own.first_raw;
    w.raw_l = w.raw_m + w.group;
  }
}

void AttendWorks::SumPages() {
  for (size_t i = 0; i < planes_.size(); ++i) {
    const AttendPlanesWork& w = planes_[i];
    const int64_t rows = int64_t{w.queries} * w.group;  // floats from a partial to the next
    float* const to = raw_.data() + planes_place_[i].first_raw;
    for (int32_t g = 0; g < w.group; ++g) {
      float top = -std::numeric_limits<float>::infinity();
      for (int32_t part = 1; part <= planes_place_[i].pages; ++part) {
        const float m = w.m[g - part * rows];
        if (!(m <= top)) top = m;  // a NaN stays
      }
      double sum = 0;
      for (int32_t part = planes_place_[i].pages; part >= 1; --part) {
        const float l = w.l[g - part * rows];
        if (l != 0) sum += double{l} * std::exp(double{w.m[g - part * rows]} - double{top});
      }
      to[g] = top;
      to[w.group + g] = static_cast<float>(sum);
    }
  }
}

void AttendWorks::CountPlanes() const {
  for (size_t i = 0; i < planes_.size(); ++i) {
    ReadCost* const read = planes_place_[i].read;
    if (read == nullptr) continue;
    const AttendPlanesWork& w = planes_[i];
    const auto fine =
        static_cast<uint64_t>(std::count(w.fine, w.fine + w.rows.tokens(), uint8_t{1}));
    const auto strips =
        static_cast<uint64_t>(std::count(w.strips, w.strips + w.rows.strips(), uint8_t{1}));
    read->rows += fine;
    read->coarse_rows += strips * kStripTokens - fine;
    read->bytes += static_cast<uint64_t>(PlanesBytesRead(w.rows, w.fine, w.strips));
  }
}

void AttendWorks::Attend(const Backend& backend, Executor& executor) {
  Resolve();
  const auto run = [&executor](const auto& works, auto op) {
    if (!works.empty()) op(works.data(), static_cast<int64_t>(works.size()), executor);
  };
  run(rotate_, backend.rotate);
  run(attend_, backend.attend_raw);
  SumPages();
  run(planes_, backend.attend_planes);
  CountPlanes();
  run(packed_, backend.attend_packed);
  run(lowrank_, backend.attend_lowrank);
  run(coarse_, backend.attend_coarse);
  run(merge_, backend.merge);
}

}  // namespace kvstrata
