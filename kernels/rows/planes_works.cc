// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/planes_works.h"

#include <cmath>
#include <limits>

namespace kvstrata {

void PlanesWorks::Clear() {
  works_.clear();
  places_.clear();
  upper_.clear();
  lower_.clear();
  flag_end_ = raw_end_ = 0;
}

void PlanesWorks::Add(AttendPlanesWork work, size_t first_group, int32_t pages, ReadCost* read) {
  work.rows.groups = static_cast<int32_t>(upper_.size() - first_group);
  places_.push_back({first_group, flag_end_, raw_end_, pages, read});
  flag_end_ += static_cast<size_t>(work.rows.tokens() + work.rows.strips());
  raw_end_ += 2 * static_cast<size_t>(work.group);
  works_.push_back(work);
}

void PlanesWorks::Resolve() {
  flags_.resize(flag_end_);
  raw_.resize(raw_end_);
  for (size_t i = 0; i < works_.size(); ++i) {
    AttendPlanesWork& w = works_[i];
    w.rows.upper = upper_.data() + places_[i].first_group;
    w.rows.lower = lower_.data() + places_[i].first_group;
    w.fine = flags_.data() + places_[i].first_flag;
    w.strips = w.fine + w.rows.tokens();
    w.raw_m = raw_.data() + places_[i].first_raw;
    w.raw_l = w.raw_m + w.group;
  }
}

void PlanesWorks::SumPages(size_t item) {
  const AttendPlanesWork& w = works_[item];
  const int32_t pages = places_[item].pages;
  const int64_t rows = int64_t{w.queries} * w.group;  // floats from a partial to the next
  float* const to = raw_.data() + places_[item].first_raw;
  for (int32_t g = 0; g < w.group; ++g) {
    float top = -std::numeric_limits<float>::infinity();
    for (int32_t part = pages; part > 0; --part) {
      const float m = w.m[g - part * rows];
      if (!(m <= top)) top = m;  // a NaN stays
    }
    double sum = 0;
    for (int32_t part = pages; part > 0; --part) {
      const float l = w.l[g - part * rows];
      if (l != 0) sum += double{l} * std::exp(double{w.m[g - part * rows]} - double{top});
    }
    to[g] = top;
    to[w.group + g] = static_cast<float>(sum);
  }
}

void PlanesWorks::CountReads(size_t item) const {
  ReadCost* const read = places_[item].read;
  if (read == nullptr) return;
  const AttendPlanesWork& w = works_[item];
  const int64_t fine = CountFlags(w.fine, w.rows.tokens());
  const int64_t strips = CountFlags(w.strips, w.rows.strips());
  read->rows += static_cast<uint64_t>(fine);
  read->coarse_rows += static_cast<uint64_t>(strips * kStripTokens - fine);
  read->bytes += static_cast<uint64_t>(PlanesBytesRead(w.rows, w.fine, w.strips));
}

void PlanesWorks::Attend(const Backend& backend, Executor& executor) {
  if (works_.empty()) return;
  Resolve();
  for (size_t i = 0; i < works_.size(); ++i) SumPages(i);
  backend.attend_planes(works_.data(), static_cast<int64_t>(works_.size()), executor);
  for (size_t i = 0; i < works_.size(); ++i) CountReads(i);
}

}  // namespace kvstrata
