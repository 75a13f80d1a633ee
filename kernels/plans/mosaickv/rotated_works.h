// SPDX-License-Identifier: Apache-2.0
// RotatedWorks: items of an op over packed rows, which takes its queries rotated, and those
// queries. Private to mosaickv.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/plans/mosaickv/ops/packed_ops.h"
#include "kernels/rows/codec_works.h"

namespace kvstrata {

// Query tokens of [rows][dim] floats each, `stride` floats apart.
struct RotatedQueries {
  const float* q = nullptr;
  int32_t tokens = 1, rows = 0, dim = 0;
  int64_t stride = 0;
};

template <typename Work, auto kOp>
class RotatedWorks final : public CodecWorks {
 public:
  // Its q is [tokens][rows][dim] of the queries by r [dim][dim]. Items that follow each other with
  // the same queries and rotation share them.
  void Add(const Work& work, const float* r, const RotatedQueries& queries) {
    const float* const last = queries.q + (queries.tokens - 1) * queries.stride;
    const bool shared = !rotate_.empty() && rotate_.back().r == r && rotate_.back().x == last;
    work_q_.push_back(shared ? work_q_.back() : Rotate(r, queries));
    works_.push_back(work);
  }

  void Clear() override {
    works_.clear();
    rotate_.clear();
    rotated_.clear();
    work_q_.clear();
    rotate_out_.clear();
  }

  void Run(const Backend& backend, Executor& executor) override {
    if (works_.empty()) return;
    for (size_t i = 0; i < rotate_.size(); ++i) rotate_[i].out = rotated_.data() + rotate_out_[i];
    for (size_t i = 0; i < works_.size(); ++i) works_[i].q = rotated_.data() + work_q_[i];
    const PackedOps& ops = OpsOf<PackedOps>(backend.packed);
    ops.rotate(rotate_.data(), static_cast<int64_t>(rotate_.size()), executor);
    (ops.*kOp)(works_.data(), static_cast<int64_t>(works_.size()), executor);
  }

 private:
  // Where in rotated_ they will be.
  size_t Rotate(const float* r, const RotatedQueries& queries) {
    const size_t at = rotated_.size();
    const auto floats = static_cast<size_t>(int64_t{queries.rows} * queries.dim);  // a token's
    for (int32_t i = 0; i < queries.tokens; ++i) {
      RotateWork& w = rotate_.emplace_back();
      w.r = r;
      w.dim = queries.dim;
      w.x = queries.q + i * queries.stride;
      w.x_row = queries.dim;
      w.rows = queries.rows;
      rotate_out_.push_back(at + static_cast<size_t>(i) * floats);
    }
    rotated_.resize(at + static_cast<size_t>(queries.tokens) * floats);
    return at;
  }

  std::vector<Work> works_;
  std::vector<RotateWork> rotate_;
  std::vector<float> rotated_;
  std::vector<size_t> work_q_, rotate_out_;  // in rotated_, which moves while it grows
};

using PackedAttends = RotatedWorks<AttendPackedWork, &PackedOps::attend_packed>;
using PackedScores = RotatedWorks<ScorePackedWork, &PackedOps::score_packed>;

}  // namespace kvstrata
