// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/attend_works.h"

namespace kvstrata {

void AttendWorks::Clear() {
  runs_.clear();
  attend_.clear();
  coarse_.clear();
  planes_.Clear();
  codec_.Clear();
  merge_.clear();
  attend_run_.clear();
  coarse_run_.clear();
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

void AttendWorks::Resolve() {
  for (size_t i = 0; i < attend_.size(); ++i) {
    if (attend_run_[i] != kElsewhere) attend_[i].runs = runs_.data() + attend_run_[i];
  }
  for (size_t i = 0; i < coarse_.size(); ++i) coarse_[i].runs = runs_.data() + coarse_run_[i];
}

void AttendWorks::Attend(const Backend& backend, Executor& executor) {
  Resolve();
  const auto run = [&executor](const auto& works, auto op) {
    if (!works.empty()) op(works.data(), static_cast<int64_t>(works.size()), executor);
  };
  run(attend_, backend.attend_raw);
  planes_.Attend(backend, executor);
  codec_.Run(backend, executor);
  run(coarse_, backend.attend_coarse);
  run(merge_, backend.merge);
}

}  // namespace kvstrata
