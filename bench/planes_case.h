// SPDX-License-Identifier: Apache-2.0
// Groups of planes of random rows, and a decode step over them: for ops_bench.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/pack_planes/pack_planes.h"

namespace kvstrata {

// One layer: `heads` KV heads with `group` query heads each, all groups of `tokens` tokens sealed.
class PlanesCase {
 public:
  struct Shape {
    int heads = 0, group = 0, tokens = 0;
    PlanesFormat format;
  };

  // keys, values: of a head, by number.
  template <typename Keys, typename Values>
  PlanesCase(const Shape& shape, const Keys& keys, const Values& values, Executor& executor)
      : s_(shape),
        groups_(shape.tokens / shape.format.tokens),
        upper_(Bytes(shape.format.upper_bytes())),
        lower_(Bytes(shape.format.lower_bytes())),
        fine_(static_cast<size_t>(shape.heads * shape.tokens)),
        strips_(fine_.size() / kStripTokens) {
    std::vector<PackPlanesWork> work;
    for (int h = 0; h < s_.heads; ++h) {
      for (int g = 0; g < groups_; ++g) {
        const int64_t at = int64_t{h} * groups_ + g;
        uppers_.push_back(upper_.data() + at * s_.format.upper_bytes());
        lowers_.push_back(lower_.data() + at * s_.format.lower_bytes());
        work.push_back({keys(h), values(h), g * s_.format.tokens, s_.format,
                        upper_.data() + at * s_.format.upper_bytes(),
                        lower_.data() + at * s_.format.lower_bytes()});
      }
    }
    PackPlanesRef(work.data(), static_cast<int64_t>(work.size()), executor);
    const auto rows = static_cast<size_t>(s_.heads * s_.group);
    m_.resize(rows), l_.resize(rows), o_.resize(rows * static_cast<size_t>(s_.format.dim));
  }
  PlanesCase(const PlanesCase&) = delete;

  // q [heads * group][dim]. Without raw rows, but for the token itself, which has no weight.
  void Step(const float* q, float scale, const PlanesRule& rule, Executor& executor) {
    static const std::vector<float> none_m(64, -1e30f), none_l(64, 1.0f);
    std::vector<AttendPlanesWork> work(static_cast<size_t>(s_.heads));
    for (int h = 0; h < s_.heads; ++h) {
      AttendPlanesWork& w = work[static_cast<size_t>(h)];
      const auto row = static_cast<size_t>(h * s_.group);
      w.rows = {s_.format, &uppers_[static_cast<size_t>(h * groups_)],
                &lowers_[static_cast<size_t>(h * groups_)], groups_};
      w.rule = rule;
      w.tokens = s_.tokens + 1;
      w.q = q + row * static_cast<size_t>(s_.format.dim);
      w.group = s_.group;
      w.scale = scale;
      w.raw_m = none_m.data(), w.raw_l = none_l.data();
      w.m = &m_[row], w.l = &l_[row], w.o = &o_[row * static_cast<size_t>(s_.format.dim)];
      w.fine = &fine_[static_cast<size_t>(h * s_.tokens)];
      w.strips = &strips_[static_cast<size_t>(h * s_.tokens / kStripTokens)];
    }
    AttendPlanesSimd(work.data(), s_.heads, executor);
    bytes_ = 0;
    for (const AttendPlanesWork& w : work) bytes_ += PlanesBytesRead(w.rows, w.fine, w.strips);
  }
  // What the rule reads of groups, of the last step.
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::byte> Bytes(int64_t of_group) const {
    return std::vector<std::byte>(static_cast<size_t>(s_.heads * groups_ * of_group));
  }

  const Shape s_;
  const int groups_;
  std::vector<std::byte> upper_, lower_;
  std::vector<const std::byte*> uppers_, lowers_;
  std::vector<uint8_t> fine_, strips_;
  std::vector<float> m_, l_, o_;
  int64_t bytes_ = 0;
};

}  // namespace kvstrata
